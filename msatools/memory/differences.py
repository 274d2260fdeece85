# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Explains why a sum of the scan and the kernel's counter differ.

A reason must have been counted independently. On a dump, data that could not be read or
followed is a loss and explains nothing: a broken list leaves a failed check. On a
running kernel, pages and counters change during the scan, by amounts that the kernel
counts as well.
"""

from msgspec import Struct

from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog

_MAX_CPU_DELTA = 127
"""Largest value of a CPU's part of a counter, a signed byte (vm_stat_diff)."""

_VMALLOC = ("a list of vmalloc areas", "vmalloc", "vmalloc_areas_unreadable")

_LOSSES = {
    "kernel.vmalloc": _VMALLOC,
    "kernel.stacks": _VMALLOC,
    "kernel.percpu": ("a list of percpu chunks", "percpu", "page_tables_unreadable"),
    "free.pcp": ("pcp_lists_broken",),
}
"""Losses on a running kernel that leave a class with fewer pages than counted."""

_SLAB_LOSSES = (
    "lists_broken",
    "tasks_unreadable",
    "a socket's queue",
    "pipes and sockets",
    "file_tables_unreadable",
    "files_unreadable",
    "sockets_unreadable",
    "skbs_unreadable",
)
"""Losses that make socket data count as large kmalloc."""

_PER_CPU = frozenset(
    {
        "free.buddy",
        "user.anon",
        "cache",
        "cache.shmem",
        "swapcache",
        "kernel.slab",
        "kernel.page_tables",
        "kernel.stacks",
        "kernel.zsmalloc",
    }
)
"""Checks against counters that have a per-CPU part."""

_PASSING = _PER_CPU | {"cache.blockdev", "kernel.vmalloc"}
"""Checks of pages that may be freed and reused during a scan."""


class Reason(Struct, frozen=True):
    """A known cause of a difference between a sum and a counter, and its pages."""

    pages: int
    text: str


class Difference(Struct, frozen=True):
    """A sum and the counter that differs from it, in pages."""

    name: str
    """Name of the check."""

    walk: int
    kernel: int
    before: int | None = None
    """The counter before the scan; ``None`` on a dump or if it is unreadable."""

    reason: Reason | None = None

    @property
    def unreasoned(self) -> int:
        """Pages of the difference that the reason does not cover."""
        covered = 0 if self.reason is None else self.reason.pages
        return self.walk - self.kernel - covered

    def is_within(self, slack: int = 0) -> bool:
        """Return whether the counter may have had the sum's value during the scan."""
        if self.before is None:
            return False
        low, high = sorted((self.before, self.kernel))
        return low - slack <= self.walk <= high + slack

    def after_reason(self, text: str) -> str:
        """Return *text*, after the reason's text if that covers any page."""
        if self.reason is None or not self.reason.pages:
            return text
        return f"{self.reason.text}; {text}"


class Meanwhile(Struct, frozen=True):
    """Pages that a running kernel moved, allocated and freed during the scan."""

    moved: int = 0
    allocated: int = 0
    freed: int = 0


def explain(
    difference: Difference,
    meanwhile: Meanwhile | None,
    missing: int,
    losses: LossLog,
) -> str | None:
    """
    Explain a difference.

    :param meanwhile: ``None`` on a dump.
    :param missing: Struct pages that could not be read.
    :return: ``None`` if no counted reason explains it: a failed check.
    """
    if difference.reason is not None and not difference.unreasoned:
        return difference.reason.text
    if meanwhile is not None:
        text = _explain_by_changes(difference, meanwhile)
        if text is not None:
            return text
    if 0 < -difference.unreasoned <= missing:
        text = f"{missing:,} struct pages could not be read"
        return difference.after_reason(text)
    if difference.unreasoned < 0 and losses.coverage[Loss.SECTION_TABLE.value]:
        return difference.after_reason("not all sections of memory are left")
    cpus = losses.coverage["vmstat_cpus_unreadable"]
    held = cpus * _MAX_CPU_DELTA if difference.name in _PER_CPU else 0
    if 0 < abs(difference.unreasoned) <= held:
        text = f"{cpus} per-CPU parts of counters could not be read"
        return difference.after_reason(text)
    if meanwhile is not None:
        return _explain_by_losses(difference, losses)
    return None


def _explain_by_changes(difference: Difference, meanwhile: Meanwhile) -> str | None:
    name, before, reason = difference.name, difference.before, difference.reason
    if before is None:
        return None
    changed = f"went from {before:,} to {difference.kernel:,} during the scan"
    if difference.is_within():
        return changed
    if reason is not None:
        # Both: the counter changed, and it never includes the reason's pages.
        walk = difference.walk - reason.pages
        rest = Difference(name, walk, difference.kernel, before)
        if rest.is_within():
            return difference.after_reason(changed)
    # A page that migrates to a pfn already scanned is missed, and one that migrates
    # the other way is counted twice. The counters do not show it.
    if name in _PER_CPU and difference.is_within(meanwhile.moved):
        return f"up to {meanwhile.moved:,} pages moved to others during the scan"
    if name == "free.pcp":
        # A page that was on a list when it was scanned may have been allocated since,
        # and the list refilled from the buddy allocator; or it was freed just now.
        passed = meanwhile.allocated + meanwhile.freed
        if difference.is_within(passed):
            return f"up to {passed:,} pages were taken or freed during the scan"
    # A counter that has its old value again may have had another in between: extra
    # pages were freed after they were scanned, missing ones before.
    if name in _PASSING and difference.is_within(meanwhile.freed):
        freed = meanwhile.freed
        return f"up to {freed:,} pages were freed during the scan, and used anew"
    return None


def _explain_by_losses(difference: Difference, losses: LossLog) -> str | None:
    """Explain by lists and tables of a running kernel that changed during the scan."""
    unreasoned = difference.unreasoned
    keys = _LOSSES.get(difference.name, ()) if unreasoned < 0 else ()
    if difference.name == "kernel.slab" and unreasoned > 0:
        keys = _SLAB_LOSSES
    if any(losses.about[key] or losses.coverage[key] for key in keys):
        text = "some data on their use could not be read during the scan"
        return difference.after_reason(text)
    return None
