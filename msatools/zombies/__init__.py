# SPDX-License-Identifier: LGPL-2.1-or-later

"""Why the dead are not reaped, and what they use up: msa-zombies.

``zombies`` collects a report of ``model``; ``verdicts`` says why, ``limits`` what is
used.
"""

__all__ = (
    "model",
    "zombies",
)
