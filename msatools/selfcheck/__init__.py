# SPDX-License-Identifier: LGPL-2.1-or-later

"""Check that the numbers of the commands agree on a kernel: ``--self-check``.

``selfcheck`` runs the checks; ``memory``, ``tasks`` and ``commands`` define them.
"""

__all__ = (
    "model",
    "selfcheck",
)
