# SPDX-License-Identifier: LGPL-2.1-or-later

"""Options of msa-cpus."""

from msgspec import Struct


class CpusOptions(Struct, frozen=True):
    """What to read and report."""

    cpus: frozenset[int] | None = None
    """The CPUs to report; ``None`` for all possible ones."""

    sets: tuple[str, ...] | None = None
    """The sets whose CPUs to report; ``None`` for all."""

    irqs: bool = False
    """Report each interrupt."""

    tasks: bool = False
    """Read all tasks: pinned and straying ones by set, involuntary switches and
    migrations by CPU."""

    doing: bool = False
    """Report what each CPU did when a dump was made."""

    stalls: bool = False
    """Report what stands still, with the evidence."""

    stacks: bool = False
    """Report the stack of each CPU, in a dump."""

    plan: frozenset[int] | None = None
    """The CPUs to plan to set apart."""

    whole: bool = False
    """Report everything, to be selected from later."""
