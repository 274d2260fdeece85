# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rings of waiters (include/linux/list.h), and what lies on them.

On a running kernel a ring may change while it is read: what points at a node and what
the node says itself have to agree.
"""

import struct
from dataclasses import dataclass

import drgn

from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog
from msatools.locks.base.struct_reader import Layout
from msatools.target.addresses import KERNEL_HALF

_WORD = struct.Struct("<Q")
_HALF = struct.Struct("<I")

_TASK_ALIGNED = 64
"""Tasks begin at a cache line (``L1_CACHE_BYTES``, ``ARCH_MIN_TASKALIGN``)."""


def may_be_task(address: int | None) -> bool:
    """Return whether an address may be that of a ``struct task_struct``."""
    return (
        address is not None and address >= KERNEL_HALF and not address % _TASK_ALIGNED
    )


@dataclass(frozen=True)
class Entry:
    """A node of a ring, read as if it were a waiter."""

    node: int
    next: int
    previous: int

    task: int | None
    """``None`` if only the node itself can be read."""

    kind: int
    """The first 32 bits of the member that distinguishes kinds; 0 if there is none."""


@dataclass(frozen=True)
class Shape:
    """Where the members of a kind of waiter are, seen from its list node."""

    node: int
    """Where that is in the structure."""

    start: int
    size: int
    """Of the part that is read."""

    task: int
    kind: int | None

    @classmethod
    def of(
        cls, layout: Layout, type_name: str, node: str, task: str, kind: str = ""
    ) -> "Shape":
        """Find the members of a type of waiters.

        :raises LookupError: if they are unknown
        """
        at = layout.offset(type_name, node)
        of_task = layout.offset(type_name, task) - at
        of_kind = layout.offset(type_name, kind) - at if kind else None
        start = min(0, of_task, of_kind or 0)
        end = max(16, of_task + 8, 0 if of_kind is None else of_kind + 4)
        return cls(at, start, end - start, of_task, of_kind)


@dataclass(frozen=True)
class Ring:
    """A ring, as it was followed from one of its nodes."""

    entries: list[Entry]
    """Of a whole ring in order, that node first."""

    whole: bool = False
    """Whether these are all; if not, they are the nearest."""

    cut: bool = False
    """Whether there are more entries, which were not read."""

    @property
    def nodes(self) -> set[int]:
        """The addresses of the nodes."""
        return {entry.node for entry in self.entries}

    def begin(self, node: int) -> list[Entry]:
        """Return the entries of a whole ring in order, a node first."""
        place = [entry.node for entry in self.entries].index(node)
        return self.entries[place:] + self.entries[:place]

    def after(self, node: int) -> list[Entry]:
        """Return the entries of a whole ring in order, those that follow a node."""
        return self.begin(node)[1:]


class Rings:
    """Follows rings of one kernel."""

    def __init__(self, layout: Layout, losses: LossLog) -> None:
        self._layout = layout
        self._losses = losses

    def is_linked(self, node: int, following: int, before: int) -> bool:
        """Return whether the neighbours of a node point back at it."""
        if min(following, before) < KERNEL_HALF or (following | before) % 8:
            return False
        try:
            return (
                self._layout.word(following + 8) == node
                and self._layout.word(before) == node
            )
        except drgn.FaultError:
            return False

    def walk(self, head: int, shape: Shape, limit: int) -> list[Entry] | None:
        """
        Return what is on a list, in its order.

        :param head: The ``struct list_head`` that is on no waiter.
        :param limit: How many at most: that there are more is noted.
        :return: ``None`` if there are more, or if it is lost.
        """
        entries: list[Entry] = []
        try:
            first, last = self._layout.reader.words(head, 2).tolist()
            entry = Entry(head, first, last, None, 0)
            while entry.next != head:
                if len(entries) == limit:
                    self.note_cut(limit)
                    return None
                found = self._neighbour(entry, entry.next, shape, forwards=True)
                if found is None:
                    self._lose("a list of waiters changed, or is damaged")
                    return None
                entry = found
                entries.append(entry)
        except drgn.FaultError as error:
            self._lose(f"a list of waiters is lost: {error}")
            return None
        if last != entry.node:
            self._lose("a list of waiters changed, or is damaged")
            return None
        return entries

    def follow(
        self, node: int, shape: Shape, limit: int, first: Entry | None = None
    ) -> Ring:
        """
        Follow a ring forwards from a node, and where that is too long backwards, too.

        It is neither whole nor cut if its nodes do not agree, or one is lost.

        :param limit: How many other nodes are read.
        :param first: What may be at that node, if it is not known to be on a ring.
        """
        ahead: list[Entry] = []
        behind: list[Entry] = []
        back = limit // 3
        try:
            ahead.append(first or self._entry(node, shape))
            for _ in range(limit - back):
                if ahead[-1].next == node:
                    return Ring(ahead, whole=ahead[0].previous == ahead[-1].node)
                found = self._neighbour(ahead[-1], ahead[-1].next, shape, True)
                if found is None:
                    return Ring(ahead)
                ahead.append(found)
            before = ahead[0]
            for _ in range(back):
                if before.previous == ahead[-1].node:
                    return Ring(ahead + behind[::-1], whole=True)
                found = self._neighbour(before, before.previous, shape, False)
                if found is None:
                    return Ring(ahead + behind)
                behind.append(found)
                before = found
        except drgn.FaultError as error:
            # A node without readable neighbours may never have been on a ring.
            if first is None or len(ahead) > 1:
                self._lose(f"a ring of waiters is lost: {error}")
            return Ring(ahead + behind)
        return Ring(ahead + behind, cut=True)

    def note_cut(self, limit: int) -> None:
        """Note that not all waiters were read."""
        self._losses.note(
            "waiters-not-counted",
            f"more than {limit} wait for one lock; they were not counted",
        )

    def _neighbour(
        self, entry: Entry, node: int, shape: Shape, forwards: bool
    ) -> Entry | None:
        """Read the next entry, or the one before; ``None`` if they do not agree.

        :raises drgn.FaultError: if it cannot be read
        """
        found = self._entry(node, shape) if node >= KERNEL_HALF else None
        if found is None or entry.node != (found.previous if forwards else found.next):
            return None
        return found

    def _entry(self, node: int, shape: Shape) -> Entry:
        """Read what is at a node.

        :raises drgn.FaultError: if the node itself cannot be read
        """
        try:
            data = self._layout.reader.read(node + shape.start, shape.size)
        except drgn.FaultError:
            # A list's head may be the last in its page; a waiter goes on.
            following, before = self._layout.reader.words(node, 2).tolist()
            return Entry(node, following, before, None, 0)
        following, before, task = (
            _WORD.unpack_from(data, offset - shape.start)[0]
            for offset in (0, 8, shape.task)
        )
        kind = 0
        if shape.kind is not None:
            (kind,) = _HALF.unpack_from(data, shape.kind - shape.start)
        return Entry(node, following, before, task, kind)

    def _lose(self, text: str) -> None:
        self._losses.lose(Loss.WAITERS, text)
