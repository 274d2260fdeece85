# SPDX-License-Identifier: LGPL-2.1-or-later

"""The commands, one per file; installed as ``msatools.commands``."""
