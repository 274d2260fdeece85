# SPDX-License-Identifier: LGPL-2.1-or-later

"""The commands, one a file; installed as ``msatools.commands``."""
