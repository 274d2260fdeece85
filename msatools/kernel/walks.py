# SPDX-License-Identifier: LGPL-2.1-or-later

"""Walks of lists, red-black trees, XArrays and maple trees.

All are bounded. A walk of a list ends at damage; one of a tree leaves out the subtree.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import drgn
import numpy as np
from msgspec import Struct

from msatools.errors import UNREADABLE, DamagedDataError
from msatools.kernel.reader import (
    LIST_HEAD,
    MAX_WINDOWS,
    U64,
    WINDOW,
    Addresses,
    Reader,
    unsigned,
)
from msatools.kernel.report import Loss, LossLog
from msatools.selfdesc.find import find_type, member_of, offset_of

MAX_LIST = 16 << 20
"""Maximum number of entries of a list or tree, more than any kernel has. It is lower if
memory cannot hold that many nodes."""

_MAX_ASTRAY = 1024
"""Maximum number of wrong back pointers in a list or tree. On a running kernel some are
wrong, as entries come and go between two reads; in other data almost all are."""

_RB_NODE = struct.Struct("<QQQ")
"""``struct rb_node``: parent, with the colour in the low bits; right; left."""

_COLOUR = 3
_U64_MAX = (1 << 64) - 1


def list_nodes(reader: Reader, head: int, losses: LossLog, name: str) -> Addresses:
    """
    Find the nodes on a ``struct list_head`` list.

    Damage is handled as by :func:`list_records`; an intact list of a dump takes a third
    of the time.

    :param head: Address of the list head.
    :param name: What the list is called in a note.
    """
    nodes = None if reader.is_live else _sound_list(reader, head)
    if nodes is None:
        records = list_records(reader, head, 0, LIST_HEAD.size, losses, name)
        nodes = np.array([node for node, _ in records], np.uint64)
    return nodes


def list_words(
    reader: Reader, head: int, node_offset: int, offset: int, losses: LossLog, name: str
) -> Addresses:
    """
    Read one 64-bit word of each structure on a ``struct list_head`` list.

    Damage is handled as by :func:`list_records`; an intact list of a dump takes half
    the time. On a running kernel the word is read together with the node, as later the
    memory may hold another structure.

    :param head: Address of the list head.
    :param node_offset: Offset of the list node in the structure.
    :param offset: Offset of the word in the structure.
    :param name: What the list is called in a note.
    """
    columns = list_columns(reader, head, node_offset, (offset,), losses, name)
    words: Addresses = columns[0]
    return words


def list_columns(
    reader: Reader,
    head: int,
    node_offset: int,
    offsets: tuple[int, ...],
    losses: LossLog,
    name: str,
) -> Addresses:
    """
    Read several 64-bit words of each structure as :func:`list_words` reads one.

    :param offsets: Offset of each word in the structure.
    :return: The words, shape ``(len(offsets), structures)``.
    """
    nodes = None if reader.is_live else _sound_list(reader, head)
    if nodes is not None:
        found = [
            reader.words_near(nodes + np.uint64((offset - node_offset) & _U64_MAX))
            for offset in offsets
        ]
        if all(readable.all() for _, readable in found):
            return np.stack([words for words, _ in found])
    size = max(offsets) + 8
    rows = [
        [unsigned(data, offset, 8) for offset in offsets]
        for _, data in list_records(reader, head, node_offset, size, losses, name)
    ]
    return np.array(rows, np.uint64).reshape(-1, len(offsets)).T


def _sound_list(reader: Reader, head: int) -> Addresses | None:
    """
    Return the nodes of a list of a dump; ``None`` if it does not lead back to its head.

    Back pointers are checked only after 1, 2, 4, ... nodes.
    """
    windows: dict[int, memoryview] = {}
    nodes: list[int] = []
    node = head
    try:
        while len(nodes) < _most(reader) and _has_prev(reader, [head, *nodes[-2:]]):
            # Brent's detection of loops without the head (BIT 20, 1980): *passed* is
            # set to the current node after each power of two; a loop returns to it.
            passed = node
            for _ in range(max(len(nodes), 1)):
                number = node // WINDOW
                try:
                    window = windows[number]
                except KeyError:
                    if len(windows) >= MAX_WINDOWS:
                        windows.clear()
                    data = reader.window(number * WINDOW)
                    window = windows[number] = memoryview(data).cast("Q")
                node = window[node % WINDOW // 8]
                if node == head:
                    addresses = np.array(nodes, np.uint64)
                    return None if (addresses % np.uint64(8)).any() else addresses
                if node == passed:
                    return None
                nodes.append(node)
    except UNREADABLE:
        pass
    return None


def _has_prev(reader: Reader, nodes: list[int]) -> bool:
    """Return whether ``prev`` of the last of *nodes* points to the one before."""
    if len(nodes) < 2:
        return True
    _, previous = LIST_HEAD.unpack(reader.read_near(nodes[-1], LIST_HEAD.size))
    return bool(previous == nodes[-2])


def list_records(
    reader: Reader,
    head: int,
    node_offset: int,
    size: int,
    losses: LossLog,
    name: str,
    loss: Loss = Loss.LISTS,
) -> Iterator[tuple[int, bytes]]:
    """
    Yield each structure on a ``struct list_head`` list, with at most one read each.

    The walk ends with a loss if a node cannot be read, if the list loops without its
    head, or if too many back pointers are wrong for a list.

    :param head: Address of the list head.
    :param node_offset: Offset of the list node in the structure.
    :param size: Bytes of the structure to read.
    :param name: What the list is called in a note.
    :param loss: Kind of the loss.
    :return: Iterator of (address, bytes) of each structure.
    """
    seen: set[int] = set()
    most = _most(reader)
    before, astray = head, 0
    size = max(size, node_offset + LIST_HEAD.size)
    try:
        node = int(reader.words(head, 1)[0])
        while node != head:
            if not node or astray > _MAX_ASTRAY:
                _walks_broken(losses, loss, name, "leads nowhere")
                return
            if node in seen or len(seen) >= most:
                _walks_broken(losses, loss, name, "is a loop")
                return
            seen.add(node)
            address = node - node_offset
            data = reader.read_near(address, size)
            yield address, data
            following, previous = LIST_HEAD.unpack_from(data, node_offset)
            astray += previous != before
            node, before = following, node
    except UNREADABLE as error:
        _walks_broken(losses, loss, name, f"cannot be read: {error}")


def tree_records(
    reader: Reader,
    root: int,
    node_offset: int,
    size: int,
    losses: LossLog,
    name: str,
    loss: Loss = Loss.LISTS,
) -> Iterator[tuple[int, bytes]]:
    """
    Yield each structure in a red-black tree, with at most one read each, in no order.

    A node that cannot be read is a loss, and is left out with its subtree.

    :param root: Address of the ``struct rb_root``.
    :param node_offset: Offset of the ``struct rb_node`` in the structure.
    :param size: Bytes of the structure to read.
    :param name: What the tree is called in a note.
    :param loss: Kind of the loss.
    :return: Iterator of (address, bytes) of each structure.
    """
    seen: set[int] = set()
    most = _most(reader)
    astray = 0
    size = max(size, node_offset + _RB_NODE.size)
    try:
        todo = [(int(reader.words(root, 1)[0]), 0)]
    except UNREADABLE as error:
        _walks_broken(losses, loss, name, f"cannot be read: {error}")
        return
    while todo:
        node, above = todo.pop()
        if not node:
            continue
        if astray > _MAX_ASTRAY:
            _walks_broken(losses, loss, name, "leads nowhere")
            return
        if node in seen or len(seen) >= most:
            _walks_broken(losses, loss, name, "is a loop")
            return
        seen.add(node)
        address = node - node_offset
        try:
            data = reader.read_near(address, size)
        except UNREADABLE as error:
            _walks_broken(losses, loss, name, f"cannot be read: {error}")
            continue
        yield address, data
        parent, right, left = _RB_NODE.unpack_from(data, node_offset)
        astray += parent & ~_COLOUR != above
        todo += ((right, node), (left, node))


def _most(reader: Reader) -> int:
    """Return the maximum number of nodes of a list or tree."""
    return min(MAX_LIST, reader.most(LIST_HEAD.size))


def _walks_broken(losses: LossLog, loss: Loss, name: str, why: str) -> None:
    text = f"{name} {why}; what comes after is not counted"
    losses.lose(loss, text, about=name)


# --- Walks of task lists, which change during the walk on a running kernel.


_MAX_RESUMED = 256
"""Maximum number of times that one walk goes back to a task still on the list."""


def changing_list(
    reader: Reader,
    head: int,
    offset: int,
    size: int,
    seen: set[int],
    name: str,
    losses: LossLog,
    node: int | None = None,
    first: int | None = None,
) -> Iterator[tuple[int, bytes]]:
    """
    Yield the tasks on a list, with one read each, from *node* or else the first on.

    On a running kernel a task may end between two reads, and its memory be reused for
    another task elsewhere on the list: the walk would skip all tasks in between. So
    ``prev`` of each node must be a node that was visited; else the walk goes back to
    the last one that is still on the list. If the list breaks off, a note is made and
    the tasks after that point are missing.

    :param offset: Offset of the list node in the task.
    :param size: Bytes of each task to read, its node among them.
    :param seen: Addresses of tasks to skip; the ones that are yielded are added.
    :param name: What the list is called in a note.
    :param first: The node before *node*, if the walk starts within the list.
    :return: Iterator of (address, bytes) of each task.
    """
    most = min(_most(reader), reader.most(size))
    trail = [head] if first is None else [head, first]
    visited = {*trail}
    resumed = again = 0
    try:
        if node is None:
            (node,) = U64.unpack(reader.read(head, 8))
        if not reader.prog.flags & drgn.ProgramFlags.IS_LIVE:
            # A faster loop for many tasks: a dump's list does not change.
            read, next_of = reader.read, U64.unpack_from
            while node != head:
                address = node - offset
                if not node or address in seen or len(seen) > most:
                    raise DamagedDataError("it leads nowhere", node)
                data = read(address, size)
                seen.add(address)
                yield address, data
                (node,) = next_of(data, offset)
            return
        while node != head:
            address = node - offset
            new = address not in seen
            again += not new
            # The memory of a task that was visited may by now be that of a new one.
            looping = not new and again > len(seen)
            if not node or looping or len(seen) > most:
                raise DamagedDataError("it leads nowhere", node)
            data = reader.read(address, size)
            following, previous = LIST_HEAD.unpack_from(data, offset)
            if previous not in visited:
                resumed += 1
                losses.coverage["lists_resumed"] += 1
                if resumed > _MAX_RESUMED:
                    raise DamagedDataError("it changes too fast", node)
                node = _resume(reader, trail, visited)
                if node is None:
                    if first is not None:
                        return  # the process has ended
                    (node,) = U64.unpack(reader.read(head, 8))
                continue
            seen.add(address)
            trail.append(node)
            visited.add(node)
            if new:
                yield address, data
            node = following
    except UNREADABLE as error:
        losses.lose(Loss.LISTS, f"{name} breaks off: {error}", about=name)


def _resume(reader: Reader, trail: list[int], visited: set[int]) -> int | None:
    """Return the node after the last visited one that is still on its list.

    A node that has left the list has LIST_POISON2 as ``prev``.

    :return: ``None`` if no visited node is still on the list.
    """
    while len(trail) > 1:
        following, previous = LIST_HEAD.unpack(reader.read(trail[-1], LIST_HEAD.size))
        if previous in visited:
            return int(following)
        trail.pop()
    return None


# --- XArrays and maple trees: a node that cannot be read is left out with its subtree.


MAX_NODES = 1 << 20
"""Maximum number of nodes of an XArray or maple tree, more than any kernel has."""

Entries = list[tuple[int, int, int]]
"""First index, last index and pointer of each entry; ascending."""

_LAST = (1 << 64) - 1

# include/linux/xarray.h: a pointer has neither of the two low bits; xa_is_internal()
# entries have only bit 1. Above 4096 these are nodes, see xa_is_node(), else special
# entries, such as XA_RETRY_ENTRY. The same holds for the root of a maple tree.
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

    def forget(self) -> None:
        """Forget the nodes that were read, which may have changed."""
        self._top_entry = None
        self._nodes.clear()

    def load(self, index: int) -> int:
        """Find the pointer at an index; 0 if not found.

        :raises UNREADABLE: if a node above it is damaged
        """
        entry, above = self._top(), None
        if not _is_node(entry) and index:
            # xa_head itself is the entry of index 0 if it is no node.
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
    """First and last index that the slot covers."""

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
    """Find all entries that are not nodes: pointers, integers and special entries."""
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
    :raises UNREADABLE: if a node above it is damaged
    """
    nodes = _maple_nodes(reader)
    (entry,) = _words(reader.read(root + nodes.root, 8), 0, 1)
    is_node = _is_node(entry)
    part = _Part(entry, 0, _LAST if is_node else 0, is_node)
    for _ in range(_MAPLE_HEIGHT):
        if not part.is_node:
            is_here = part.first <= index <= part.last
            return part.entry if is_here and not part.entry & _LOW_BITS else 0
        part = nodes.part_at(part, index)
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
        inner = _maple_type(node) != _MAPLE_LEAF
        return [_Part(*slot, inner) for slot in self._slots(node)]

    def part_at(self, node: _Part, index: int) -> _Part:
        """Return the slot of a node that covers an index; an empty part if none does.

        :raises UNREADABLE: as :meth:`parts`
        """
        for child, first, last in self._slots(node):
            if first <= index <= last:
                return _Part(child, first, last, _maple_type(node) != _MAPLE_LEAF)
        return _Part(0, 0, _LAST, False)

    def _slots(self, node: _Part) -> Iterator[tuple[int, int, int]]:
        shape = self._types.get(_maple_type(node))
        if shape is None:
            raise DamagedDataError("a node of no known type", node.entry)
        data = self._reader.read(node.entry & _MAPLE_NODE, shape.size)
        return shape.slots(data, node.first, node.last)


def _maple_type(node: _Part) -> int:
    return node.entry >> _MAPLE_TYPE_SHIFT & _MAPLE_TYPE


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
        _xarray_broken(losses, name, f"cannot be read: {error}")
        return found
    # The root is itself the entry of index 0 if it is no node.
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
            _xarray_broken(losses, name, "is a loop")
            break
        seen.add(part.entry)
        try:
            todo += parts(part)
        except UNREADABLE as error:
            _xarray_broken(losses, name, f"cannot be read: {error}")
    return sorted(found)


def _is_node(entry: int) -> bool:
    return entry & _LOW_BITS == _INTERNAL and entry > _MAX_SPECIAL


def _is_sibling(entry: int) -> bool:
    """Return whether the slot belongs to the entry before it (xa_is_sibling())."""
    return entry & _LOW_BITS == _INTERNAL and entry >> 2 < _MOST_SLOTS


def _words(data: bytes, offset: int, count: int) -> list[int]:
    return list(struct.unpack_from(f"<{count}Q", data, offset))


def _xarray_broken(losses: LossLog, name: str, why: str) -> None:
    text = f"{name} {why}; what is below is not counted"
    losses.lose(Loss.TREES, text, about=name)
