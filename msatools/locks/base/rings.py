# SPDX-License-Identifier: LGPL-2.1-or-later

"""Follows rings of waiters (include/linux/list.h).

On a running kernel a ring may change while it is read. So ``next`` and ``prev`` of two
neighbours have to point at each other.
"""

from msgspec import Struct

from msatools.errors import UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog
from msatools.kernel.words import U32, U64
from msatools.locks.base.struct_reader import Layout
from msatools.target.addresses import KERNEL_HALF

_TASK_ALIGNED = 64
"""Alignment of tasks in memory (``L1_CACHE_BYTES``, ``ARCH_MIN_TASKALIGN``)."""


def may_be_task(address: int | None) -> bool:
    """Return whether an address may be that of a ``struct task_struct``."""
    return (
        address is not None and address >= KERNEL_HALF and not address % _TASK_ALIGNED
    )


class Entry(Struct, frozen=True):
    """A node of a ring, read as if it were a waiter."""

    node: int
    next: int
    previous: int

    task: int | None
    """Address of the task; ``None`` if only the node itself could be read."""

    kind: int
    """The low 32 bits of the member that identifies the kind of waiter; 0 if the type
    has no such member."""


class Shape(Struct, frozen=True):
    """The layout of a kind of waiter; offsets are from its list node."""

    node: int
    """Offset of the list node in the structure."""

    start: int
    """Offset of the part that is read."""

    size: int
    """Bytes of the part that is read."""

    task: int
    kind: int | None

    @classmethod
    def of(
        cls, layout: Layout, type_name: str, node: str, task: str, kind: str = ""
    ) -> "Shape":
        """Return the layout of a type.

        :raises MissingError: if the type or a member is unknown
        """
        node_offset = layout.offset(type_name, node)
        task_offset = layout.offset(type_name, task) - node_offset
        kind_offset = layout.offset(type_name, kind) - node_offset if kind else None
        start = min(0, task_offset, kind_offset or 0)
        end = max(16, task_offset + 8, 0 if kind_offset is None else kind_offset + 4)
        return cls(node_offset, start, end - start, task_offset, kind_offset)


class Ring(Struct, frozen=True):
    """A ring that was followed from one of its nodes."""

    entries: list[Entry]
    """The nodes: all of a whole ring in order, otherwise the nearest. The start node is
    the first."""

    whole: bool = False
    """Whether all nodes were read."""

    cut: bool = False
    """Whether there were too many nodes to read them all."""

    @property
    def nodes(self) -> set[int]:
        """The addresses of the nodes."""
        return {entry.node for entry in self.entries}

    def begin(self, node: int) -> list[Entry]:
        """Return the entries of a whole ring in order, starting with a node."""
        index = [entry.node for entry in self.entries].index(node)
        return self.entries[index:] + self.entries[:index]

    def after(self, node: int) -> list[Entry]:
        """Return the other entries of a whole ring in order, starting after a node."""
        return self.begin(node)[1:]


class Rings:
    """Follows rings of one kernel."""

    def __init__(self, layout: Layout, losses: LossLog) -> None:
        self._layout = layout
        self._losses = losses

    def is_linked(self, node: int, following: int, previous: int) -> bool:
        """Return whether the neighbours of a node point back at it."""
        if min(following, previous) < KERNEL_HALF or (following | previous) % 8:
            return False
        try:
            return (
                self._layout.word(following + 8) == node
                and self._layout.word(previous) == node
            )
        except UNREADABLE:
            return False

    def walk(self, head: int, shape: Shape, limit: int) -> list[Entry] | None:
        """
        Return the waiters on a list, in its order.

        :param head: Address of the list head.
        :param limit: Maximum number of waiters; a note is made if there are more.
        :return: ``None`` if there are more, or if the list cannot be read.
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
        except UNREADABLE as error:
            self._lose(f"cannot read a list of waiters: {error}")
            return None
        if last != entry.node:
            self._lose("a list of waiters changed, or is damaged")
            return None
        return entries

    def follow(
        self, node: int, shape: Shape, limit: int, first: Entry | None = None
    ) -> Ring:
        """
        Follow a ring forwards from a node, and, if it is too long, backwards as well.

        The ring is neither whole nor cut if the pointers of its nodes are inconsistent,
        or a node could not be read.

        :param limit: Maximum number of other nodes to read.
        :param first: The entry of *node*, if *node* may not be on a ring at all.
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
        except UNREADABLE as error:
            # A node without readable neighbours may never have been on a ring.
            if first is None or len(ahead) > 1:
                self._lose(f"cannot read a ring of waiters: {error}")
            return Ring(ahead + behind)
        return Ring(ahead + behind, cut=True)

    def note_cut(self, limit: int) -> None:
        """Make a note that not all waiters were read."""
        self._losses.note(
            "waiters-not-counted",
            f"more than {limit} wait for one lock; they were not counted",
        )

    def _neighbour(
        self, entry: Entry, node: int, shape: Shape, forwards: bool
    ) -> Entry | None:
        """Read the next or the previous entry.

        :return: ``None`` if it does not point back at *entry*.
        :raises drgn.FaultError: if it cannot be read
        """
        found = self._entry(node, shape) if node >= KERNEL_HALF else None
        if found is None or entry.node != (found.previous if forwards else found.next):
            return None
        return found

    def _entry(self, node: int, shape: Shape) -> Entry:
        """Read an entry.

        :raises drgn.FaultError: if the node itself cannot be read
        """
        try:
            data = self._layout.reader.read(node + shape.start, shape.size)
        except UNREADABLE:
            # The node may be a list head at the end of its page.
            following, previous = self._layout.reader.words(node, 2).tolist()
            return Entry(node, following, previous, None, 0)
        following, previous, task = (
            U64.unpack_from(data, offset - shape.start)[0]
            for offset in (0, 8, shape.task)
        )
        kind = 0
        if shape.kind is not None:
            (kind,) = U32.unpack_from(data, shape.kind - shape.start)
        return Entry(node, following, previous, task, kind)

    def _lose(self, text: str) -> None:
        self._losses.lose(Loss.WAITERS, text)
