# SPDX-License-Identifier: LGPL-2.1-or-later

"""Walking the kernel's linked structures: bounded, and past damage."""

import struct
from collections.abc import Iterator

import drgn

from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings

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


def list_records(
    reader: Reader,
    head: int,
    node_offset: int,
    size: int,
    findings: Findings,
    name: str,
) -> Iterator[tuple[int, bytes]]:
    """
    Read each structure on a ``struct list_head`` list, one read each or fewer.

    A list that breaks off, that comes back to an entry it had before, or that is none
    as its entries do not name those before them, ends there with a note.

    :param head: Address of the list's head.
    :param node_offset: Offset of the list node in the structure.
    :param size: Bytes of the structure to read.
    :param name: What the list is called in a note.
    :return: Iterator of (address, bytes) of each structure.
    """
    seen: set[int] = set()
    before, astray = head, 0
    size = max(size, node_offset + _LINKS.size)
    try:
        node = int(reader.words(head, 1)[0])
        while node != head:
            if not node or astray > _MAX_ASTRAY:
                _broken(findings, name, "leads nowhere")
                return
            if node in seen or len(seen) >= MAX_LIST:
                _broken(findings, name, "is a loop")
                return
            seen.add(node)
            address = node - node_offset
            data = reader.read_near(address, size)
            yield address, data
            following, previous = _LINKS.unpack_from(data, node_offset)
            astray += previous != before
            node, before = following, node
    except drgn.FaultError as error:
        _broken(findings, name, f"cannot be read: {error}")


def tree_records(
    reader: Reader,
    root: int,
    node_offset: int,
    size: int,
    findings: Findings,
    name: str,
) -> Iterator[tuple[int, bytes]]:
    """
    Read each structure in a red-black tree, one read each or fewer, in no order.

    A child that cannot be read costs a note and what is under it.

    :param root: Address of the ``struct rb_root``.
    :param node_offset: Offset of the ``struct rb_node`` in the structure.
    :param size: Bytes of the structure to read.
    :param name: What the tree is called in a note.
    :return: Iterator of (address, bytes) of each structure.
    """
    seen: set[int] = set()
    astray = 0
    size = max(size, node_offset + _RB_NODE.size)
    try:
        todo = [(int(reader.words(root, 1)[0]), 0)]
    except drgn.FaultError as error:
        _broken(findings, name, f"cannot be read: {error}")
        return
    while todo:
        node, above = todo.pop()
        if not node:
            continue
        if astray > _MAX_ASTRAY:
            _broken(findings, name, "leads nowhere")
            return
        if node in seen or len(seen) >= MAX_LIST:
            _broken(findings, name, "is a loop")
            return
        seen.add(node)
        address = node - node_offset
        try:
            data = reader.read_near(address, size)
        except drgn.FaultError as error:
            _broken(findings, name, f"cannot be read: {error}")
            continue
        yield address, data
        parent, right, left = _RB_NODE.unpack_from(data, node_offset)
        astray += parent & ~_COLOUR != above
        todo += ((right, node), (left, node))


def _broken(findings: Findings, name: str, why: str) -> None:
    findings.coverage["lists_broken"] += 1
    findings.lose(name, f"{name} {why}; what comes after is not counted")
