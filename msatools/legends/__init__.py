# SPDX-License-Identifier: LGPL-2.1-or-later

"""The legends of the commands: what each name in an output means, a module a command.

``--why``, the lines below a report with ``-v``, the help of the live screen and the
manual pages all print these texts, and have none of their own. The modules have words
alone: they import nothing of the rest.
"""

from msatools.legends.model import Entry, Group, Legend, completable, find, legend_of

__all__ = ["Entry", "Group", "Legend", "completable", "find", "legend_of"]
