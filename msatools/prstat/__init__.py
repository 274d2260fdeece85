# SPDX-License-Identifier: LGPL-2.1-or-later

"""What every process and thread is doing, and where its time went: msa-prstat.

``prstat`` collects a report of ``model``; ``rows`` are built when they are looked at.
"""

__all__ = (
    "model",
    "prstat",
)
