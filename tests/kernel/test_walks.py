# SPDX-License-Identifier: LGPL-2.1-or-later

"""Walks of lists and trees, intact and damaged."""

import random
from struct import pack

import pytest

from msatools.kernel.reader import MAX_WINDOWS, WINDOW, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.walks import (
    list_nodes,
    list_records,
    list_words,
    tree_records,
)

from .memory import BASE, reader_of

STEP = 64


def at(index: int) -> int:
    return BASE + STEP * index


def list_of(*nexts: int) -> bytes:
    """Make a list head and entries, with the list node at byte 8.

    :param nexts: for the head and each entry, the index of the next
    """
    return b"".join(
        pack("<QQ", index, at(target) + 8).ljust(STEP, b"\0")
        for index, target in enumerate(nexts)
    )


def walk(data: bytes, holes: tuple[int, ...] = ()) -> tuple[list[int], LossLog]:
    losses = LossLog()
    reader = reader_of(data, holes)
    records = list_records(reader, at(0) + 8, 8, 32, losses, "a list")
    return [int.from_bytes(data[:8], "little") for _, data in records], losses


LOOP = list_of(1, 2, 1)
"""A loop that does not include the head."""

NULL = list_of(1, 2) + pack("<QQ", 2, 0).ljust(STEP, b"\0")
"""A list whose last entry has a null pointer."""


@pytest.mark.parametrize(
    ("data", "holes", "found", "broken"),
    [
        (list_of(2, 0, 1), (), [2, 1], 0),
        (list_of(0), (), [], 0),
        (LOOP, (), [1, 2], 1),
        (list_of(1, 2, 3, 0), (2,), [1], 1),
        (NULL, (), [1, 2], 1),
    ],
)
def test_list(
    data: bytes, holes: tuple[int, ...], found: list[int], broken: int
) -> None:
    entries, losses = walk(data, holes)
    assert entries == found
    assert losses.coverage["lists_broken"] == len(losses.notes) == broken
    if data == LOOP:
        assert "loop" in next(iter(losses.notes.values())).text


def linked(*links: tuple[int, int]) -> bytes:
    """Make a list head and entries.

    :param links: for the head and each entry, the indices of the next and the previous
    """
    return b"".join(
        pack("<QQQ", 0, at(following) + 8, at(previous) + 8).ljust(STEP, b"\0")
        for following, previous in links
    )


def nodes(
    data: bytes, holes: tuple[int, ...] = ()
) -> tuple[list[int], LossLog, Reader]:
    losses = LossLog()
    data = data.ljust(-(-len(data) // WINDOW) * WINDOW, b"\0")
    reader = reader_of(data, holes, granule=WINDOW)
    found = list_nodes(reader, at(0) + 8, losses, "a list")
    assert {(node - 8 - BASE) % STEP for node in found.tolist()} <= {0}
    return [(node - BASE) // STEP for node in found.tolist()], losses, reader


@pytest.mark.parametrize("count", [0, 1, 2, 3, 64, 65, 1000])
def test_nodes_of_a_sound_list(count: int) -> None:
    order = random.Random(count).sample(range(1, count + 1), count)
    nexts = dict(zip([0, *order], [*order, 0], strict=True))
    backs = {following: node for node, following in nexts.items()}
    found, losses, reader = nodes(
        linked(*((nexts[i], backs[i]) for i in range(count + 1)))
    )
    assert found == order
    assert not losses.coverage
    assert reader.reads == -(-STEP * (count + 1) // WINDOW)


@pytest.mark.parametrize("count", [1, 2, 5, 1000])
@pytest.mark.parametrize("back", [1, 2, 600])
def test_nodes_of_a_loop_that_misses_the_head(count: int, back: int) -> None:
    back = min(back, count)
    loop = [(i + 1, i - 1) for i in range(count)]
    found, losses, _ = nodes(linked(*loop, (back, count - 1)))
    assert found == [*range(1, count + 1)]
    assert losses.coverage["lists_broken"] == 1
    assert "loop" in next(iter(losses.notes.values())).text


def words(
    data: bytes, offset: int, holes: tuple[int, ...] = (), live: bool = False
) -> tuple[list[int], LossLog, Reader]:
    losses = LossLog()
    data = data.ljust(-(-len(data) // WINDOW) * WINDOW, b"\0")
    reader = reader_of(data, holes, granule=WINDOW)
    reader.is_live = live
    found = list_words(reader, at(0) + 8, 8, offset, losses, "a list")
    return found.tolist(), losses, reader


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 200])
def test_words_of_a_list(count: int, live: bool) -> None:
    links = [(i + 1, i - 1) for i in range(count)]
    data = bytearray(linked(*links, (0, count - 1)))
    for i in range(count + 1):
        data[STEP * i : STEP * i + 8] = pack("<Q", i)
        data[STEP * i + 24 : STEP * i + 32] = pack("<Q", (1 << 64) - 1 - i)
    before, losses, reader = words(bytes(data), 0, live=live)
    assert before == [*range(1, count + 1)]
    assert not losses.coverage
    # On a running kernel, each word is read together with the link to the next node.
    assert reader.reads == 1 + count if live else -(-STEP * (count + 1) // WINDOW)
    after, _, _ = words(bytes(data), 24, live=live)
    assert after == [(1 << 64) - 1 - i for i in range(1, count + 1)]


def test_words_that_cannot_be_read() -> None:
    """The word of the last node is in the next page, which is missing."""
    count = WINDOW // STEP
    links = [(i + 1, i - 1) for i in range(count - 1)]
    found, losses, _ = words(linked(*links, (0, count - 2)), STEP, holes=(1,))
    assert len(found) == count - 2
    assert losses.coverage["lists_broken"] == 1


def test_nodes_in_more_windows_than_are_kept() -> None:
    count = 2 * MAX_WINDOWS
    data = bytearray((count + 1) * WINDOW)
    for i in range(count + 1):
        pair = ((i + 1) % (count + 1)) * WINDOW, ((i - 1) % (count + 1)) * WINDOW
        data[i * WINDOW : i * WINDOW + 16] = pack("<QQ", *(BASE + x for x in pair))
    reader, losses = reader_of(bytes(data)), LossLog()
    found = list_nodes(reader, BASE, losses, "a list")
    assert found.tolist() == [BASE + WINDOW * i for i in range(1, count + 1)]
    words = list_words(reader, BASE, 0, 8, losses, "a list")
    assert words.tolist() == [BASE, *found.tolist()[:-1]]
    assert not losses.coverage


@pytest.mark.parametrize("following", [0, 3, at(2) + 9])
def test_nodes_before_an_invalid_pointer(following: int) -> None:
    data = bytearray(list_of(1, 2, 0))
    data[STEP + 8 : STEP + 16] = pack("<Q", following)
    losses = LossLog()
    reader = reader_of(bytes(data.ljust(WINDOW, b"\0")))
    found = list_nodes(reader, at(0) + 8, losses, "a list")
    assert found.tolist()[:1] == [at(1) + 8]
    assert losses.coverage["lists_broken"] == 1


def tree(*nodes: tuple[int, int]) -> bytes:
    """Make a tree's root and nodes.

    :param nodes: for each node, the indices of its right and left child, 0 for none
    """
    root = pack("<Q", at(1) if nodes else 0).ljust(STEP, b"\0")
    return root + b"".join(
        pack("<QQQ", 0, right and at(right), left and at(left)).ljust(STEP, b"\0")
        for right, left in nodes
    )


def indices(data: bytes, holes: tuple[int, ...] = ()) -> tuple[list[int], LossLog]:
    losses = LossLog()
    reader = reader_of(data, holes)
    records = tree_records(reader, at(0), 0, 32, losses, "a tree")
    return sorted((address - BASE) // STEP for address, _ in records), losses


TREE = tree((2, 3), (0, 4), (0, 0), (0, 0))


@pytest.mark.parametrize(
    ("data", "holes", "found", "broken"),
    [
        (TREE, (), [1, 2, 3, 4], 0),
        (tree(), (), [], 0),
        (TREE, (2,), [1, 3], 1),  # a hole costs a branch only
        (tree((2, 0), (1, 0)), (), [1, 2], 1),  # a loop
    ],
)
def test_tree(
    data: bytes, holes: tuple[int, ...], found: list[int], broken: int
) -> None:
    nodes, losses = indices(data, holes)
    assert nodes == found
    assert losses.coverage["lists_broken"] == len(losses.notes) == broken
