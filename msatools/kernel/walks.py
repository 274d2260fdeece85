# SPDX-License-Identifier: LGPL-2.1-or-later

"""Walks of the kernel's lists and red-black trees: bounded, and tolerant of damage."""

import struct
from collections.abc import Iterator

import numpy as np

from msatools.errors import UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.reader import MAX_WINDOWS, WINDOW, Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.words import LIST_HEAD, unsigned

MAX_LIST = 16 << 20
"""Maximum number of entries, more than any list or tree of a kernel has; where memory
cannot hold that many nodes, less."""

_MAX_ASTRAY = 1024
"""Maximum number of entries whose back pointer may be wrong. On a running kernel some
are, as entries come and go between two reads; in data that is not a list almost all
are."""

_RB_NODE = struct.Struct("<QQQ")
"""``struct rb_node``: parent, with the colour in the low bits; right; left."""

_COLOUR = 3
_U64_MAX = (1 << 64) - 1


def list_nodes(reader: Reader, head: int, losses: LossLog, name: str) -> Addresses:
    """
    Find the nodes on a ``struct list_head`` list.

    It behaves like :func:`list_records`, but takes a third of the time for an intact
    list of a dump.

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

    It behaves like :func:`list_records`, but takes half the time for an intact list of
    a dump. On a running kernel the word is read together with the node: later the
    memory may hold another structure.

    :param head: Address of the list head.
    :param node_offset: Offset of the list node in the structure.
    :param offset: Offset of the word.
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
    Return the nodes of a list that leads back to its head; ``None`` if it does not.

    Back pointers are checked only after 1, 2, 4, ... nodes.
    """
    windows: dict[int, memoryview] = {}
    nodes: list[int] = []
    node = head
    try:
        while len(nodes) < _most(reader) and _has_prev(reader, [head, *nodes[-2:]]):
            # Brent's detection of loops without the head (BIT 20, 1980): *passed* is
            # renewed at each power of two, and seen again if it is on a loop.
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
    """Return whether ``prev`` of the last of consecutive nodes is the one before."""
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
    Read each structure on a ``struct list_head`` list, with at most one read each.

    The walk ends with a note if the list cannot be read further, loops without its
    head, or is not a list: too many back pointers are wrong.

    :param head: Address of the list head.
    :param node_offset: Offset of the list node in the structure.
    :param size: Bytes of the structure to read.
    :param name: What the list is called in a note.
    :param loss: The loss to count then.
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
                _broken(losses, loss, name, "leads nowhere")
                return
            if node in seen or len(seen) >= most:
                _broken(losses, loss, name, "is a loop")
                return
            seen.add(node)
            address = node - node_offset
            data = reader.read_near(address, size)
            yield address, data
            following, previous = LIST_HEAD.unpack_from(data, node_offset)
            astray += previous != before
            node, before = following, node
    except UNREADABLE as error:
        _broken(losses, loss, name, f"cannot be read: {error}")


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
    Read each structure in a red-black tree, with at most one read each, in no order.

    A child that cannot be read costs a note, and is left out with its subtree.

    :param root: Address of the ``struct rb_root``.
    :param node_offset: Offset of the ``struct rb_node`` in the structure.
    :param size: Bytes of the structure to read.
    :param name: What the tree is called in a note.
    :param loss: The loss to count then.
    :return: Iterator of (address, bytes) of each structure.
    """
    seen: set[int] = set()
    most = _most(reader)
    astray = 0
    size = max(size, node_offset + _RB_NODE.size)
    try:
        todo = [(int(reader.words(root, 1)[0]), 0)]
    except UNREADABLE as error:
        _broken(losses, loss, name, f"cannot be read: {error}")
        return
    while todo:
        node, above = todo.pop()
        if not node:
            continue
        if astray > _MAX_ASTRAY:
            _broken(losses, loss, name, "leads nowhere")
            return
        if node in seen or len(seen) >= most:
            _broken(losses, loss, name, "is a loop")
            return
        seen.add(node)
        address = node - node_offset
        try:
            data = reader.read_near(address, size)
        except UNREADABLE as error:
            _broken(losses, loss, name, f"cannot be read: {error}")
            continue
        yield address, data
        parent, right, left = _RB_NODE.unpack_from(data, node_offset)
        astray += parent & ~_COLOUR != above
        todo += ((right, node), (left, node))


def _most(reader: Reader) -> int:
    """Return how many nodes a list or tree can have."""
    return min(MAX_LIST, reader.most(LIST_HEAD.size))


def _broken(losses: LossLog, loss: Loss, name: str, why: str) -> None:
    text = f"{name} {why}; what comes after is not counted"
    losses.lose(loss, text, about=name)
