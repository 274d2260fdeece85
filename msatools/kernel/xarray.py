# SPDX-License-Identifier: LGPL-2.1-or-later

"""Trees that map indices to pointers: XArrays and maple trees.

Walks are bounded, and tolerant of damage: no node is read twice, and one that cannot be
read costs a note, and is left out with its subtree.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import drgn
import numpy as np
from msgspec import Struct

from msatools.errors import UNREADABLE, DamagedDataError
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.selfdesc.find import find_type, member_of, offset_of

MAX_NODES = 1 << 20
"""Maximum number of nodes, more than any tree that is walked here has."""

Entries = list[tuple[int, int, int]]
"""First index, last index and pointer of each entry; ascending."""

_LAST = (1 << 64) - 1

# include/linux/xarray.h: a pointer has neither of the two low bits; xa_is_internal()
# entries have only bit 1. Above 4096 these are nodes, see xa_is_node(), else special
# entries, such as XA_RETRY_ENTRY. The root of a maple tree is the same.
_LOW_BITS = 3
_INTERNAL = 2
_VALUE = 1
_MAX_SPECIAL = 4096
_MOST_SLOTS = 64
"""XA_CHUNK_SIZE; 16 with CONFIG_BASE_SMALL."""

# include/linux/maple_tree.h: the low bits of a pointer to a node hold its type.
_MAPLE_NODE = ~255
_MAPLE_TYPE_SHIFT = 3
_MAPLE_TYPE = 15
_MAPLE_LEAF = 1
"""``maple_leaf_64`` of enum maple_type; later types are not leaves."""

_MAPLE_HEIGHT = 32
"""Steps from the root to an entry: one more than MAPLE_HEIGHT_MAX."""


_MAX_SHIFT = 64
"""More than the shift of any node of an XArray."""


class XArray:
    """The pointers of one ``struct xarray`` by index; its nodes are read once.

    lib/xarray.c: each level of the tree decodes some bits of the index. IDRs and former
    radix trees use it, too.
    """

    def __init__(self, reader: Reader, root: int) -> None:
        """
        :param root: Address of the ``struct xarray``.
        """
        self._reader = reader
        self._shape = _xarray_nodes(reader)
        self._head = root + self._shape.head
        self._bits = self._shape.count.bit_length() - 1
        self._top_entry: int | None = None
        self._nodes: dict[int, tuple[int, memoryview[int]]] = {}

    def load(self, index: int) -> int:
        """Find the pointer at an index; 0 if not found.

        :raises UNREADABLE: if something on the way is damaged
        """
        entry, above = self._top(), None
        if not _is_node(entry) and index:
            # The entry of a tree without nodes is at index 0.
            return 0
        while _is_node(entry):
            shift, slots = self._node(entry)
            # The shift decreases with each level, so this ends.
            if shift % self._bits or (above is not None and shift != above):
                raise DamagedDataError("a node of another level", entry)
            if above is None and index >> shift >= self._shape.count:
                return 0
            last = self._shape.count - 1
            entry = slots[index >> shift & last]
            if _is_sibling(entry):
                # The pointer in another slot covers this one, too.
                entry = slots[entry >> 2 & last]
            if shift == 0:
                break
            above = shift - self._bits
        return 0 if entry & _LOW_BITS else entry

    def count_below(self, end: int) -> int:
        """Count the indices below *end* that have a pointer.

        A tree without nodes, whose only entry is at index 0, counts as empty.

        :raises UNREADABLE: if a part of the tree is damaged
        """
        taken, todo = 0, [(self._top(), 0, _MAX_SHIFT)]
        while todo:
            entry, first, above = todo.pop()
            if not _is_node(entry):
                continue
            shift, words = self._node(entry)
            # The shift decreases with each level, so this ends.
            if shift % self._bits or shift >= above:
                raise DamagedDataError("a node of another level", entry)
            slots = np.array(words[: -(-(end - first) >> shift)], np.uint64)
            if not shift:
                taken += int(np.count_nonzero(slots & np.uint64(_LOW_BITS) == 0))
                taken -= int(np.count_nonzero(slots == 0))
                continue
            todo += (
                (int(slots[slot]), first + (slot << shift), shift)
                for slot in np.flatnonzero(slots).tolist()
            )
        return taken

    def _top(self) -> int:
        if self._top_entry is None:
            (self._top_entry,) = _words(self._reader.read(self._head, 8), 0, 1)
        return self._top_entry

    def _node(self, entry: int) -> tuple[int, "memoryview[int]"]:
        if entry not in self._nodes:
            self._nodes[entry] = self._shape.read(self._reader, entry)
        return self._nodes[entry]


class _XArrayNodes(Struct, frozen=True):
    """Offsets of members of ``struct xarray`` and ``struct xa_node``."""

    head: int
    shift: int
    slots: int
    count: int
    """Number of slots of a node."""

    def read(self, reader: Reader, entry: int) -> tuple[int, "memoryview[int]"]:
        """Read the node that an entry points to.

        :return: Its shift, the number of index bits below its level, and its slots.
        :raises drgn.FaultError: if it cannot be read
        """
        end = self.slots + 8 * self.count
        data = reader.read(entry - _INTERNAL, end)
        return data[self.shift], memoryview(data)[self.slots : end].cast("Q")


def _xarray_nodes(reader: Reader) -> _XArrayNodes:
    return reader.once(_XArrayNodes, lambda: _find_xarray_nodes(reader.prog))


def _find_xarray_nodes(prog: drgn.Program) -> _XArrayNodes:
    node = find_type(prog, "struct xa_node")
    count = member_of(node, "slots").type.length
    assert count
    return _XArrayNodes(
        head=offset_of(find_type(prog, "struct xarray"), "xa_head"),
        shift=offset_of(node, "shift"),
        slots=offset_of(node, "slots"),
        count=count,
    )


class _Part(NamedTuple):
    """A slot of a node."""

    entry: int
    first: int
    last: int
    """First and last index that it covers."""

    is_node: bool


def xarray_entries(reader: Reader, root: int, losses: LossLog, name: str) -> Entries:
    """Find the pointers in the ``struct xarray`` at *root* (lib/xarray.c).

    :param name: What the tree is called in a note.
    """
    return [
        entry
        for entry in _xarray_slots(reader, root, losses, name)
        if not entry[2] & _LOW_BITS
    ]


def xarray_values(reader: Reader, root: int, losses: LossLog, name: str) -> Entries:
    """
    Find the integers in the ``struct xarray`` at *root* (xa_to_value()).

    :param name: What the tree is called in a note.
    """
    found: Entries = []
    for first, last, entry in sorted(_xarray_slots(reader, root, losses, name)):
        if entry & _VALUE:
            found.append((first, last, entry >> 1))
        elif found and found[-1][1] + 1 == first and _is_sibling(entry):
            # The value covers this slot, too.
            found[-1] = (found[-1][0], last, found[-1][2])
    return found


def _xarray_slots(reader: Reader, root: int, losses: LossLog, name: str) -> Entries:
    """Find all entries that are not nodes, those of no pointer included."""
    nodes = _xarray_nodes(reader)

    def parts(node: _Part) -> list[_Part]:
        shift, slots = nodes.read(reader, node.entry)
        # A node covers no more than its slot; the top one may exceed 64 bits.
        room = node.last - node.first + 1
        if node.last != _LAST and nodes.count << shift > room:
            raise DamagedDataError("a node of another level", node.entry)
        children = []
        for slot, child in enumerate(slots):
            if child:
                first = node.first + (slot << shift)
                if first > _LAST:
                    raise DamagedDataError("a node of no known level", node.entry)
                last = first + (1 << shift) - 1
                children.append(_Part(child, first, last, _is_node(child)))
        return children

    return _entries(reader, root + nodes.head, parts, losses, name)


def maple_entries(reader: Reader, root: int, losses: LossLog, name: str) -> Entries:
    """Find the pointers in the ``struct maple_tree`` at *root* (lib/maple_tree.c).

    :param name: What the tree is called in a note.
    """
    nodes = _maple_nodes(reader)
    return [
        entry
        for entry in _entries(reader, root + nodes.root, nodes.parts, losses, name)
        if not entry[2] & _LOW_BITS
    ]


def maple_load(reader: Reader, root: int, index: int) -> int:
    """Find the pointer at an index of a ``struct maple_tree``; 0 if there is none.

    :param root: Address of the tree.
    :raises UNREADABLE: if something on the way is damaged
    """
    nodes = _maple_nodes(reader)
    (entry,) = _words(reader.read(root + nodes.root, 8), 0, 1)
    is_node = _is_node(entry)
    part = _Part(entry, 0, _LAST if is_node else 0, is_node)
    for _ in range(_MAPLE_HEIGHT):
        if not part.is_node:
            is_here = part.first <= index <= part.last
            return part.entry if is_here and not part.entry & _LOW_BITS else 0
        inside = (it for it in nodes.parts(part) if it.first <= index <= it.last)
        part = next(inside, _Part(0, 0, _LAST, False))
    raise DamagedDataError("a loop of nodes", part.entry)


class _MapleNodes:
    """Layouts of a maple tree and of its nodes."""

    def __init__(self, reader: Reader) -> None:
        prog = reader.prog
        self._reader = reader
        self.root = offset_of(find_type(prog, "struct maple_tree"), "ma_root")
        range_ = _MapleNode(find_type(prog, "struct maple_range_64"))
        # maple_arange_64 stores the sizes of gaps, too.
        gaps = _MapleNode(find_type(prog, "struct maple_arange_64"))
        leaf = _MAPLE_LEAF
        self._types = {leaf: range_, leaf + 1: range_, leaf + 2: gaps}

    def parts(self, node: _Part) -> list[_Part]:
        """Read the slots of a node.

        :raises UNREADABLE: if it cannot be read, or is of no known type
        """
        type_ = node.entry >> _MAPLE_TYPE_SHIFT & _MAPLE_TYPE
        if type_ not in self._types:
            raise DamagedDataError("a node of no known type", node.entry)
        shape = self._types[type_]
        data = self._reader.read(node.entry & _MAPLE_NODE, shape.size)
        return [
            _Part(child, first, last, type_ != _MAPLE_LEAF)
            for child, first, last in shape.slots(data, node.first, node.last)
        ]


def _maple_nodes(reader: Reader) -> _MapleNodes:
    return reader.once(_MapleNodes, lambda: _MapleNodes(reader))


class _MapleNode:
    """Layout of a maple node of one type."""

    def __init__(self, type_: drgn.Type) -> None:
        self.size = drgn.sizeof(type_)
        self._pivots = offset_of(type_, "pivot")
        self._slots = offset_of(type_, "slot")
        self._end = offset_of(type_, "meta.end")
        pivots = member_of(type_, "pivot").type.length
        assert pivots
        self._count = pivots

    def slots(
        self, data: bytes, first: int, last: int
    ) -> Iterator[tuple[int, int, int]]:
        """Yield entry, first and last index of each slot that is not empty.

        Each slot ends at its pivot, and the last at *last*.
        """
        slots = _words(data, self._slots, self._count + 1)
        pivots = _words(data, self._pivots, self._count)
        shares_end = self._end < self._slots + 8 * len(slots)
        # maple_range_64: the last slot, if in use, overlays meta.end (ma_data_end()).
        end = self._count if shares_end and pivots[-1] else data[self._end]
        for slot, pivot in zip(slots, [*pivots[:end], last], strict=False):
            if slot:
                yield slot, first, min(pivot, last)
            if pivot >= last:
                return
            first = pivot + 1


def _entries(
    reader: Reader,
    head: int,
    parts: Callable[[_Part], Iterable[_Part]],
    losses: LossLog,
    name: str,
) -> Entries:
    """Walk a tree from the entry at *head*; *parts* reads the slots of a node.

    :return: All entries that are not nodes, ascending; not those of empty slots.
    """
    found: Entries = []
    try:
        (top,) = _words(reader.read(head, 8), 0, 1)
    except UNREADABLE as error:
        _broken(losses, name, f"cannot be read: {error}")
        return found
    # The entry of a tree without nodes is at index 0.
    has_nodes = _is_node(top)
    todo = [_Part(top, 0, _LAST if has_nodes else 0, has_nodes)]
    seen: set[int] = set()
    while todo:
        part = todo.pop()
        if not part.is_node:
            if part.entry:
                found.append((part.first, part.last, part.entry))
            continue
        if part.entry in seen or len(seen) >= MAX_NODES:
            _broken(losses, name, "is a loop")
            break
        seen.add(part.entry)
        try:
            todo += parts(part)
        except UNREADABLE as error:
            _broken(losses, name, f"cannot be read: {error}")
    return sorted(found)


def _is_node(entry: int) -> bool:
    return entry & _LOW_BITS == _INTERNAL and entry > _MAX_SPECIAL


def _is_sibling(entry: int) -> bool:
    """Return whether the slot belongs to the entry before it (xa_is_sibling())."""
    return entry & _LOW_BITS == _INTERNAL and entry >> 2 < _MOST_SLOTS


def _words(data: bytes, offset: int, count: int) -> list[int]:
    return list(struct.unpack_from(f"<{count}Q", data, offset))


def _broken(losses: LossLog, name: str, why: str) -> None:
    text = f"{name} {why}; what is below is not counted"
    losses.lose(Loss.TREES, text, about=name)
