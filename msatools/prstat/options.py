# SPDX-License-Identifier: LGPL-2.1-or-later

"""What can be asked of prstat."""

from dataclasses import dataclass, field

from msatools.prstat.select import Selection, SortKey

GROUPS = ("user", "cgroup", "container", "ns", "class", "comm")
"""What rows can be summed up by."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a report is to have."""

    per_thread: bool = False
    selection: Selection = field(default_factory=Selection)
    sort: tuple[SortKey, ...] = (SortKey("CPU", largest_first=True),)
    rows: int | None = None
    """How many rows, ``None`` for all."""

    children: bool = False
    states: bool = False
    load: bool = False
    users: bool = False
    cgroups: bool = False
    by: tuple[str, ...] = ()
    """Of :data:`GROUPS`."""

    stacks: bool = False
    functions: tuple[str, ...] = ()
    """Stacks with one of these."""

    modules: tuple[str, ...] = ()
    """Stacks with a function of one of these."""

    why: tuple[str, ...] = ()
    """Columns to explain."""

    hz: float | None = None
    """Samples a second within an interval, 0 for none; ``None`` for as many as
    :attr:`share` allows."""

    share: float | None = None
    """Of one CPU, which samples may take; ``None`` for what is usual."""

    whole: bool = False
    """Keep all that was found out of all threads: it is selected and sorted later."""

    @property
    def needs_namespaces(self) -> bool:
        """Whether the namespaces of threads are asked for."""
        return "ns" in self.by or self.selection.membership.namespaces is not None

    @property
    def by_thread(self) -> bool:
        """Whether rows, and what is selected, are threads; else they are processes.

        What is shown of stacks, of the load and of states is shown of threads.
        """
        return self.per_thread or self.stacks or self.load or self.states
