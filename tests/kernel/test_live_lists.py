# SPDX-License-Identifier: LGPL-2.1-or-later

"""A list is read while entries are removed and their memory is reused.

The kernel is simulated: a list of nodes, and events that change it before given reads.
"""

import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from drgn import FaultError, ProgramFlags

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.walks import changing_list

HEAD = 100
POISON = 0xDEAD000000000122
MOST_TASKS = 500
Events = dict[int, Callable[["Kernel"], None]]


class Kernel:
    """List nodes: address -> addresses of the next and the previous node."""

    def __init__(self, *nodes: int, live: bool = True) -> None:
        self.links: dict[int, list[int]] = {}
        self.events: Events = {}
        self.reads = 0
        flags = ProgramFlags.IS_LIVE if live else ProgramFlags(0)
        self.prog = SimpleNamespace(flags=flags)
        self.links[HEAD] = [HEAD, HEAD]
        for node in nodes:
            self.begin(node)

    def most(self, size: int) -> int:
        return MOST_TASKS

    def begin(self, node: int) -> None:
        """Append a node, as list_add_tail_rcu() does."""
        last = self.links[HEAD][1]
        self.links[node] = [HEAD, last]
        self.links[last][0] = self.links[HEAD][1] = node

    def end(self, node: int) -> None:
        """Remove a node, as list_del_rcu() does."""
        after, before = self.links[node]
        self.links[before][0], self.links[after][1] = after, before
        self.links[node][1] = POISON

    def read(self, address: int, size: int) -> bytes:
        self.reads += 1
        if event := self.events.pop(self.reads, None):
            event(self)
        if address not in self.links:
            raise FaultError("nothing there", address)
        return struct.pack("<QQ", *self.links[address])[:size]


def walked(kernel: Kernel) -> tuple[list[int], LossLog]:
    reader, losses = cast(Reader, kernel), LossLog()
    found = changing_list(reader, HEAD, 0, 16, set(), "a list", losses)
    return [address for address, _ in found], losses


def test_unchanged_list() -> None:
    found, losses = walked(Kernel(1, 2, 3))
    assert found == [1, 2, 3]
    assert not losses.coverage


def test_list_of_more_tasks_than_there_can_be() -> None:
    found, losses = walked(Kernel(*range(1000, 1001 + MOST_TASKS), live=False))
    assert len(found) == MOST_TASKS + 1
    found, losses = walked(Kernel(*range(1000, 2000), live=False))
    assert len(found) == MOST_TASKS + 1
    assert losses.coverage["lists_broken"] == 1


def test_next_node_is_reused() -> None:
    """The nodes between its old and its new position are not missed."""
    kernel = Kernel(1, 2, 3, 4)

    def reuse(kernel: Kernel) -> None:
        kernel.end(2)
        kernel.begin(2)

    kernel.events[3] = reuse  # after 1 was read, whose next node is 2
    found, losses = walked(kernel)
    assert found == [1, 3, 4, 2]
    assert losses.coverage == {"lists_resumed": 1}


def test_all_visited_nodes_are_removed() -> None:
    kernel = Kernel(1, 2, 3, 4)

    def end(kernel: Kernel) -> None:
        for node in (1, 2, 3):
            kernel.end(node)

    kernel.events[4] = end
    found, losses = walked(kernel)
    assert found == [1, 2, 4]
    assert "lists_broken" not in losses.coverage


def test_visited_node_is_reused() -> None:
    """It is found a second time, which does not count as a loop."""
    kernel = Kernel(1, 2, 3, 4)

    def reuse(kernel: Kernel) -> None:
        kernel.end(1)
        kernel.begin(1)
        kernel.begin(5)

    kernel.events[4] = reuse
    found, losses = walked(kernel)
    assert found == [1, 2, 3, 4, 5]
    assert "lists_broken" not in losses.coverage


@pytest.mark.parametrize("live", [False, True])
def test_loop_ends(live: bool) -> None:
    kernel = Kernel(1, 2, 3, live=live)
    kernel.links[3] = [2, 2]
    found, losses = walked(kernel)
    assert found == [1, 2, 3]
    assert losses.coverage["lists_broken"] == 1
    assert kernel.reads < 20


def test_list_that_changes_with_each_read() -> None:
    """The walk ends and is counted as broken."""
    kernel = Kernel(1, 2, 3)

    class Always(dict[int, Callable[[Kernel], None]]):
        def pop(self, *_: object) -> Callable[[Kernel], None]:  # type: ignore[override]
            return lambda kernel: kernel.links[2].__setitem__(1, POISON)

    kernel.events = Always()
    found, losses = walked(kernel)
    assert found == [1]
    assert losses.coverage["lists_broken"] == 1
    assert kernel.reads < 1000
