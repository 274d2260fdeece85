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

Contender = tuple[Callable[[], object], int]
"""What to do, and how many things it does it for."""


def medians(
    contenders: Mapping[str, Contender], rounds: int, *, children: bool = False
) -> dict[str, float]:
    """Give the median seconds of CPU that each contender takes for one thing.

    :param children: Whether it is processes that do it, which have ended then.
    """
    clock = _of_children if children else time.process_time
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _, (name, (work, things)) in itertools.product(
        range(rounds), contenders.items()
    ):
        start = clock()
        work()
        seconds[name].append((clock() - start) / things)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _of_children() -> float:
    """Return the seconds of CPU of all processes that were started and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
