# SPDX-License-Identifier: LGPL-2.1-or-later

"""Report why zombies are not reaped, and what they use up: msa-zombies.

``zombies`` collects the report of ``model``; ``verdicts`` has the reasons, ``limits``
the limits that zombies use up.
"""

__all__ = (
    "model",
    "zombies",
)
