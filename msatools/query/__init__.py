# SPDX-License-Identifier: LGPL-2.1-or-later

"""Query the times of one thread or process from a program, in some 0.1 ms.

``kernel`` holds the functions that the package ``msatools`` exports.
"""

__all__ = (
    "kernel",
    "model",
)
