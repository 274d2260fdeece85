# SPDX-License-Identifier: LGPL-2.1-or-later

"""Walking the kernel's linked structures: bounded, and past damage."""

import struct
from collections.abc import Iterator

import drgn
import numpy as np

from msatools.kernel.losses import Loss
from msatools.kernel.reader import MAX_WINDOWS, WINDOW, Addresses, Reader
from msatools.kernel.report import LossLog

MAX_LIST = 16 << 20
"""More entries than any list that a kernel keeps: a walk this long is lost."""

_MAX_ASTRAY = 1024
"""Entries that may not name the one before. On a running kernel some do not, as others
come and go between two reads; what is no list at all has hardly any that does."""

_LINKS = struct.Struct("<QQ")
"""``struct list_head``: next, previous."""

_RB_NODE = struct.Struct("<QQQ")
"""``struct rb_node``: parent and, in two bits, colour; right; left."""

_COLOUR = 3
_WORD = (1 << 64) - 1


def list_nodes(reader: Reader, head: int, losses: LossLog, name: str) -> Addresses:
    """
    Find the nodes on a ``struct list_head`` list.

    As :func:`list_records` does, but of a dump's sound list in a third of the time.

    :param head: Address of the list's head.
    :param name: What the list is called in a note.
    """
    nodes = None if reader.is_live else _sound_list(reader, head)
    if nodes is None:
        records = list_records(reader, head, 0, _LINKS.size, losses, name)
        nodes = np.array([node for node, _ in records], np.uint64)
    return nodes


def list_words(
    reader: Reader, head: int, node_offset: int, at: int, losses: LossLog, name: str
) -> Addresses:
    """
    Read one 64-bit word of each structure on a ``struct list_head`` list.

    As :func:`list_records` does, but of a dump's sound list in half the time. On a
    running kernel it comes with the node: later the structure may be another one.

    :param head: Address of the list's head.
    :param node_offset: Offset of the list node in the structure.
    :param at: Offset of the word.
    :param name: What the list is called in a note.
    """
    nodes = None if reader.is_live else _sound_list(reader, head)
    if nodes is not None:
        away = np.uint64((at - node_offset) & _WORD)
        words, readable = reader.words_near(nodes + away)
        if readable.all():
            return words
    records = list_records(reader, head, node_offset, at + 8, losses, name)
    found = [int.from_bytes(data[at : at + 8], "little") for _, data in records]
    return np.array(found, np.uint64)


def _sound_list(reader: Reader, head: int) -> Addresses | None:
    """
    Follow a list that leads back to its head; ``None`` if it does not.

    Of few nodes it is looked at whether they name those before them.
    """
    windows: dict[int, memoryview] = {}
    nodes: list[int] = []
    node = head
    try:
        while len(nodes) < MAX_LIST and _names_one_before(reader, [head, *nodes[-2:]]):
            # One that never comes back to the head comes back to what it had passed
            # when that is further on than the loop is long (Brent, BIT 20, 1980).
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
                    found = np.array(nodes, np.uint64)
                    return None if (found % np.uint64(8)).any() else found
                if node == passed:
                    return None
                nodes.append(node)
    except drgn.FaultError:
        pass
    return None


def _names_one_before(reader: Reader, nodes: list[int]) -> bool:
    """Tell whether the last of consecutive nodes names the one before it."""
    if len(nodes) < 2:
        return True
    _, previous = _LINKS.unpack(reader.read_near(nodes[-1], _LINKS.size))
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
    Read each structure on a ``struct list_head`` list, one read each or fewer.

    A list that breaks off, that comes back to an entry it had before, or that is none
    as its entries do not name those before them, ends there with a note.

    :param head: Address of the list's head.
    :param node_offset: Offset of the list node in the structure.
    :param size: Bytes of the structure to read.
    :param name: What the list is called in a note.
    :param loss: What it is that is lost then.
    :return: Iterator of (address, bytes) of each structure.
    """
    seen: set[int] = set()
    before, astray = head, 0
    size = max(size, node_offset + _LINKS.size)
    try:
        node = int(reader.words(head, 1)[0])
        while node != head:
            if not node or astray > _MAX_ASTRAY:
                _broken(losses, loss, name, "leads nowhere")
                return
            if node in seen or len(seen) >= MAX_LIST:
                _broken(losses, loss, name, "is a loop")
                return
            seen.add(node)
            address = node - node_offset
            data = reader.read_near(address, size)
            yield address, data
            following, previous = _LINKS.unpack_from(data, node_offset)
            astray += previous != before
            node, before = following, node
    except drgn.FaultError as error:
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
    Read each structure in a red-black tree, one read each or fewer, in no order.

    A child that cannot be read costs a note and what is under it.

    :param root: Address of the ``struct rb_root``.
    :param node_offset: Offset of the ``struct rb_node`` in the structure.
    :param size: Bytes of the structure to read.
    :param name: What the tree is called in a note.
    :param loss: What it is that is lost then.
    :return: Iterator of (address, bytes) of each structure.
    """
    seen: set[int] = set()
    astray = 0
    size = max(size, node_offset + _RB_NODE.size)
    try:
        todo = [(int(reader.words(root, 1)[0]), 0)]
    except drgn.FaultError as error:
        _broken(losses, loss, name, f"cannot be read: {error}")
        return
    while todo:
        node, above = todo.pop()
        if not node:
            continue
        if astray > _MAX_ASTRAY:
            _broken(losses, loss, name, "leads nowhere")
            return
        if node in seen or len(seen) >= MAX_LIST:
            _broken(losses, loss, name, "is a loop")
            return
        seen.add(node)
        address = node - node_offset
        try:
            data = reader.read_near(address, size)
        except drgn.FaultError as error:
            _broken(losses, loss, name, f"cannot be read: {error}")
            continue
        yield address, data
        parent, right, left = _RB_NODE.unpack_from(data, node_offset)
        astray += parent & ~_COLOUR != above
        todo += ((right, node), (left, node))


def _broken(losses: LossLog, loss: Loss, name: str, why: str) -> None:
    text = f"{name} {why}; what comes after is not counted"
    losses.lose(loss, text, about=name)
