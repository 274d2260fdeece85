# SPDX-License-Identifier: LGPL-2.1-or-later

"""Walks of linked structures, whole and damaged."""

import struct

from msatools.kernel.report import Findings
from msatools.kernel.walks import _MAX_ASTRAY, list_records, tree_records

from .memory import BASE, reader_of

STEP = 64


def at(index: int) -> int:
    return BASE + STEP * index


def list_of(*nexts: int) -> bytes:
    """Make a head and entries, whose list node is at 8, by the index of the next."""
    return b"".join(
        struct.pack("<QQ", index, at(target) + 8).ljust(STEP, b"\0")
        for index, target in enumerate(nexts)
    )


def walk(data: bytes, holes: tuple[int, ...] = ()) -> tuple[list[int], Findings]:
    findings = Findings()
    reader = reader_of(data, holes)
    records = list_records(reader, at(0) + 8, 8, 32, findings, "a list")
    return [int.from_bytes(data[:8], "little") for _, data in records], findings


def test_whole_list() -> None:
    found, findings = walk(list_of(2, 0, 1))
    assert found == [2, 1]
    assert not findings.notes


def test_empty_list() -> None:
    assert walk(list_of(0))[0] == []


def test_loop_that_misses_the_head_ends() -> None:
    found, findings = walk(list_of(1, 2, 1))
    assert found == [1, 2]
    assert findings.coverage["lists_broken"] == 1
    assert "loop" in next(iter(findings.notes.values())).text


def test_null_ends() -> None:
    data = list_of(1, 2, 0)
    data = data[: STEP * 2 + 8] + bytes(8) + data[STEP * 2 + 16 :]
    found, findings = walk(data)
    assert found == [1, 2]
    assert findings.coverage["lists_broken"] == 1


def test_hole_ends() -> None:
    found, findings = walk(list_of(1, 2, 3, 0), holes=(2,))
    assert found == [1]
    assert findings.coverage["lists_broken"] == 1


def test_what_is_no_list_ends_soon() -> None:
    """Each leads to the next, and none names the one before."""
    count = 2 * _MAX_ASTRAY
    found, findings = walk(list_of(*range(1, count + 1)) + bytes(STEP))
    assert len(found) == _MAX_ASTRAY + 1
    assert findings.coverage["lists_broken"] == 1


def test_long_list_that_is_one() -> None:
    count = 4 * _MAX_ASTRAY
    data = b"".join(
        struct.pack(
            "<QQQ", index, at((index + 1) % count) + 8, at(index - 1) + 8
        ).ljust(STEP, b"\0")
        for index in range(count)
    )
    found, findings = walk(data)
    assert len(found) == count - 1
    assert not findings.notes


def test_the_same_trouble_is_noted_once() -> None:
    findings = Findings()
    for _ in range(3):
        reader = reader_of(list_of(1, 1))
        list(list_records(reader, at(0) + 8, 8, 32, findings, "a list"))
    assert findings.coverage["lists_broken"] == 3
    assert len(findings.notes) == 1


def tree(*nodes: tuple[int, int]) -> bytes:
    """Make a root and nodes by the indices of their children, 0 for none."""
    root = struct.pack("<Q", at(1) if nodes else 0).ljust(STEP, b"\0")
    return root + b"".join(
        struct.pack("<QQQ", 0, right and at(right), left and at(left)).ljust(
            STEP, b"\0"
        )
        for right, left in nodes
    )


def indices(data: bytes, holes: tuple[int, ...] = ()) -> tuple[list[int], Findings]:
    findings = Findings()
    reader = reader_of(data, holes)
    records = tree_records(reader, at(0), 0, 32, findings, "a tree")
    return sorted((address - BASE) // STEP for address, _ in records), findings


def test_whole_tree() -> None:
    found, findings = indices(tree((2, 3), (0, 4), (0, 0), (0, 0)))
    assert found == [1, 2, 3, 4]
    assert not findings.notes


def test_empty_tree() -> None:
    assert indices(tree())[0] == []


def test_hole_costs_a_branch_only() -> None:
    found, findings = indices(tree((2, 3), (0, 4), (0, 0), (0, 0)), holes=(2,))
    assert found == [1, 3]
    assert findings.coverage["lists_broken"] == 1


def test_loop_in_a_tree_ends() -> None:
    found, findings = indices(tree((2, 0), (1, 0)))
    assert found == [1, 2]
    assert findings.coverage["lists_broken"] == 1
