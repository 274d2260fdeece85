# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-prstat: the activity and the times of all processes and threads.

``prstat`` collects the report, whose classes ``model`` has; ``rows`` makes rows.
"""

__all__ = (
    "model",
    "prstat",
)
