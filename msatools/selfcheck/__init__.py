# SPDX-License-Identifier: LGPL-2.1-or-later

"""``--self-check``: whether the numbers of the commands agree on a kernel.

``selfcheck`` runs checks of one reading; ``memory``, ``tasks`` and ``commands`` have
them.
"""

__all__ = (
    "model",
    "selfcheck",
)
