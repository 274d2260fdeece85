# SPDX-License-Identifier: LGPL-2.1-or-later

"""What one thread or process did and does: for programs, in some 0.1 ms.

``kernel`` has the functions of the package ``msatools`` itself.
"""

__all__ = (
    "kernel",
    "model",
)
