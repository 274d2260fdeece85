# SPDX-License-Identifier: LGPL-2.1-or-later

"""Options of prstat."""

from msgspec import Struct, field

from msatools.prstat.select import Selection, SortKey

GROUPS = ("user", "cgroup", "container", "ns", "class", "comm")
"""Properties that rows can be grouped by."""


class Options(Struct, frozen=True, kw_only=True):
    """Contents of a report."""

    per_thread: bool = False
    selection: Selection = field(default_factory=Selection)
    sort: tuple[SortKey, ...] = (SortKey("CPU", largest_first=True),)
    stuck_first: bool = False
    """Whether rows of a dump with a thread in state D come before all others, the
    longest first: of what hangs little has used a CPU."""

    rows: int | None = None
    """Maximum number of rows; ``None`` for all."""

    children: bool = False
    states: bool = False
    load: bool = False
    users: bool = False
    cgroups: bool = False
    by: tuple[str, ...] = ()
    """Some of :data:`GROUPS`."""

    stacks: bool = False
    functions: tuple[str, ...] = ()
    """Functions, one of which must be on a stack."""

    modules: tuple[str, ...] = ()
    """Modules, one of which must have a function on a stack."""

    why: tuple[str, ...] = ()
    """Columns to explain."""

    hz: float | None = None
    """Samples a second within an interval, 0 for none; ``None`` for as many as
    :attr:`share` allows."""

    share: float | None = None
    """Share of one CPU that samples may take; ``None`` for the default."""

    whole: bool = False
    """Keep all data of all threads, to be selected and sorted later."""

    @property
    def needs_namespaces(self) -> bool:
        """Whether the namespaces of threads are needed."""
        return "ns" in self.by or self.selection.membership.namespaces is not None

    @property
    def by_thread(self) -> bool:
        """Whether rows and selections are of threads instead of processes.

        Stacks, the load and states are always of threads.
        """
        return self.per_thread or self.stacks or self.load or self.states
