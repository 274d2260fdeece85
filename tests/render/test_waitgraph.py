# SPDX-License-Identifier: LGPL-2.1-or-later

"""The graph of waits in a report: from waiters to owners, and back."""

from msatools.locks.report import LocksReport
from msatools.render.locks.tree import WaitGraph
from tests.locks.madelocks import lock, report, wait


def graph(*locks: str) -> WaitGraph:
    """Make a graph of texts such as ``2,3>1``: 2 and 3 wait for a lock that 1 owns."""
    return WaitGraph(made(*locks))


def made(*locks: str) -> LocksReport:
    rows, waits = [], []
    for number, text in enumerate(locks):
        waiters, _, owners = text.partition(">")
        pids = [int(pid) for pid in waiters.split(",")]
        marked = " ".join(
            word if word[0] in "=~?" else f"={word}"
            for word in owners.split(",")
            if word
        )
        rows.append(lock(f"mutex {number}", pids, marked))
        waits += [wait(pid, f"mutex {number}") for pid in pids]
    return report(waits, rows)


def way(made: WaitGraph, pid: int) -> list[int | None]:
    return [step.owner and step.owner.pid for step in made.way(pid)]


def test_way() -> None:
    chain = graph("3>2", "2>1")
    assert way(chain, 3) == [2, 1]
    assert way(chain, 1) == []
    assert way(chain, 99) == []
    assert way(graph("3>2", "2>"), 3) == [2, None]
    # In a cycle, the way ends at the first task that it meets again.
    assert way(graph("1>2", "2>3", "3>1"), 1) == [2, 3, 1]
    assert way(graph("9>1", "1>2", "2>1"), 9) == [1, 2, 1]
    assert way(graph("1>1"), 1) == [1]
