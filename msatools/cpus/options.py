# SPDX-License-Identifier: LGPL-2.1-or-later

"""What is asked of msa-cpus."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CpusOptions:
    """What to look at, and what of it to report."""

    cpus: frozenset[int] | None = None
    """These CPUs alone; ``None`` for all that there can be."""

    sets: tuple[str, ...] | None = None
    """Those of these sets alone."""

    irqs: bool = False
    """Tell each interrupt."""

    tasks: bool = False
    """Look at all tasks: who is bound to sets or strays into them, and by CPU the
    involuntary switches and moves."""

    doing: bool = False
    """Tell what each CPU did when a dump was made."""

    whole: bool = False
    """Report all that was read: it is chosen from later."""
