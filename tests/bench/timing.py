# SPDX-License-Identifier: LGPL-2.1-or-later

"""Time contenders in turn.

By the CPU time of this process: none waits, and what others do on the same machine does
not count.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping

Contender = tuple[Callable[[], object], int]
"""What to do, and how many things it does it for."""


def medians(contenders: Mapping[str, Contender], rounds: int) -> dict[str, float]:
    """Give the median seconds of CPU that each contender takes for one thing."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _, (name, (work, things)) in itertools.product(
        range(rounds), contenders.items()
    ):
        start = time.process_time()
        work()
        seconds[name].append((time.process_time() - start) / things)
    return {name: statistics.median(times) for name, times in seconds.items()}
