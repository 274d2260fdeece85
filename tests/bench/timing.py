# SPDX-License-Identifier: LGPL-2.1-or-later

"""Time contenders in turn.

By the CPU time of this process: none waits, and what others do on the same machine does
not count.
"""

import itertools
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

Contender = tuple[Callable[[], object], int]
"""What to do, and how many things it does it for."""


class Beside(NamedTuple):
    """A row of ours, beside a peer's."""

    ours: str
    peer: str
    times: float
    """How many times as long as the peer ours takes."""


compared: list[Beside] = []
"""The rows of all benchmarks that have a peer."""


def beside(ours: str, peer: str, our_seconds: float, peer_seconds: float) -> None:
    """Note what ours and a peer take for the same."""
    compared.append(Beside(ours, peer, our_seconds / peer_seconds))


def print_behind() -> None:
    """Print the rows in which a peer is ahead, the worst first."""
    behind = [row for row in compared if row.times > 1]
    behind.sort(key=lambda row: row.times, reverse=True)
    head = f"A PEER IS AHEAD IN {len(behind)} OF {len(compared)} ROWS"
    print(f"{head:72}{'takes':>9}")
    for row in behind:
        print(f"{f'{row.ours}, beside {row.peer}':72}{row.times:7.2f} x")


def medians(
    contenders: Mapping[str, Contender], rounds: int, *, children: bool = False
) -> dict[str, float]:
    """Give the median seconds of CPU that each contender takes for one thing.

    :param children: Whether it is processes that do it, which have ended then.
    """
    seconds = _seconds(contenders, rounds, children)
    return {name: statistics.median(times) for name, times in seconds.items()}


def minima(contenders: Mapping[str, Contender], rounds: int) -> dict[str, float]:
    """Give the least seconds of CPU that each contender takes for one thing."""
    seconds = _seconds(contenders, rounds, children=False)
    return {name: min(times) for name, times in seconds.items()}


def _seconds(
    contenders: Mapping[str, Contender], rounds: int, children: bool
) -> dict[str, list[float]]:
    clock = _of_children if children else time.process_time
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _, (name, (work, things)) in itertools.product(
        range(rounds), contenders.items()
    ):
        start = clock()
        work()
        seconds[name].append((clock() - start) / things)
    return seconds


def _of_children() -> float:
    """Return the seconds of CPU of all processes that were started and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
