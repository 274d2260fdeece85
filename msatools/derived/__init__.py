# SPDX-License-Identifier: LGPL-2.1-or-later

"""Files derived from the commands: JSON Schemas, manual pages, shell completion.

Nothing imports this package while a command runs.
"""
