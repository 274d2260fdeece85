# SPDX-License-Identifier: LGPL-2.1-or-later

"""Walking the kernel's linked structures: bounded, and past damage."""

import struct
from collections.abc import Iterator

import drgn

from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings

MAX_LIST = 16 << 20
"""More entries than any list that a kernel keeps: a walk this long is lost."""

_POINTER = struct.Struct("<Q")
_CHILDREN = struct.Struct("<QQ")


def list_records(
    reader: Reader,
    head: int,
    node_offset: int,
    size: int,
    findings: Findings,
    name: str,
) -> Iterator[tuple[int, bytes]]:
    """
    Read each structure on a ``struct list_head`` list, one read each.

    A list that breaks off, or that comes back to an entry it had before, ends
    there with a note.

    :param head: Address of the list's head.
    :param node_offset: Offset of the list node in the structure.
    :param size: Bytes of the structure to read.
    :param name: What the list is called in a note.
    :return: Iterator of (address, bytes) of each structure.
    """
    seen: set[int] = set()
    try:
        node = int(reader.words(head, 1)[0])
        while node != head:
            if not node or node in seen or len(seen) >= MAX_LIST:
                _broken(findings, name, "leads nowhere" if not node else "is a loop")
                return
            seen.add(node)
            address = node - node_offset
            data = reader.read(address, size)
            yield address, data
            (node,) = _POINTER.unpack_from(data, node_offset)
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
    Read each structure in a red-black tree, one read each, in no order.

    A child that cannot be read costs a note and what is under it.

    :param root: Address of the ``struct rb_root``.
    :param node_offset: Offset of the ``struct rb_node`` in the structure.
    :param size: Bytes of the structure to read.
    :param name: What the tree is called in a note.
    :return: Iterator of (address, bytes) of each structure.
    """
    seen: set[int] = set()
    try:
        todo = [int(reader.words(root, 1)[0])]
    except drgn.FaultError as error:
        _broken(findings, name, f"cannot be read: {error}")
        return
    while todo:
        node = todo.pop()
        if not node:
            continue
        if node in seen or len(seen) >= MAX_LIST:
            _broken(findings, name, "is a loop")
            return
        seen.add(node)
        address = node - node_offset
        try:
            data = reader.read(address, size)
        except drgn.FaultError as error:
            _broken(findings, name, f"cannot be read: {error}")
            continue
        yield address, data
        # struct rb_node: colour and parent, right, left.
        todo += _CHILDREN.unpack_from(data, node_offset + 8)


def _broken(findings: Findings, name: str, why: str) -> None:
    findings.coverage["lists_broken"] += 1
    findings.lose(name, f"{name} {why}; what comes after is not counted")
