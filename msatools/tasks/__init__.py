# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks: their records, their stacks and what they wait for.

``table`` reads the ``struct task_struct`` of all threads, ``stacks`` and ``unwind``
their stacks. ``waits`` has what each function waits for, and ``sampler`` finds by it
the class of each thread.
"""

__all__ = (
    "identity",
    "sampler",
    "stacks",
    "table",
    "waits",
)
