# SPDX-License-Identifier: LGPL-2.1-or-later

"""The legends of the commands: the meaning of each name in an output, by command.

``--why``, the lines below a report with ``-v``, the help of the live screen and the
manual pages all print these texts, and have none of their own. The modules contain only
texts; ``prstat`` alone imports other packages, for texts that depend on the kernel.
"""

from msatools.legends.model import Entry, Group, Legend, completable, find, legend_of

__all__ = ["Entry", "Group", "Legend", "completable", "find", "legend_of"]
