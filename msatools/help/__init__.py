# SPDX-License-Identifier: LGPL-2.1-or-later

"""``msa help``: shows the installed guides and pages on commands."""
