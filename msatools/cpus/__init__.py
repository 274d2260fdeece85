# SPDX-License-Identifier: LGPL-2.1-or-later

"""Processor sets and the work of each CPU: msa-cpus.

``cpus`` collects a report of ``model``: sets, counters, interrupts, run queues.
``stalls`` finds CPUs and grace periods without progress; ``plan`` sets CPUs apart.
"""

__all__ = (
    "cpus",
    "model",
)
