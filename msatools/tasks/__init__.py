# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks: their records, their stacks and what they wait for.

``table`` reads the records of all threads, ``sampler`` the class of each; ``stacks``
and ``unwind`` their stacks, ``waits`` says what functions wait for.
"""

__all__ = (
    "identity",
    "sampler",
    "stacks",
    "table",
    "waits",
)
