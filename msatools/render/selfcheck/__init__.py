# SPDX-License-Identifier: LGPL-2.1-or-later

"""Text of ``--self-check``: its table, and the block for a bug report."""
