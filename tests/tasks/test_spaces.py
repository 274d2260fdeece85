# SPDX-License-Identifier: LGPL-2.1-or-later

from typing import Any

import numpy as np
import pytest

from msatools.tasks.identity import _first_of_each
from msatools.tasks.table import TaskTable


@pytest.mark.parametrize(
    ("threads", "chosen"),
    [
        ([(10, 10, 1), (11, 10, 1)], [10]),
        # The leader has exited and has no address space.
        ([(12, 10, 1), (11, 10, 1)], [11]),
        # vfork(): two processes with one address space.
        ([(30, 30, 1), (20, 20, 1), (21, 20, 1)], [20]),
        ([(10, 10, 2), (20, 20, 1)], [20, 10]),
        ([], []),
    ],
)
def test_one_thread_for_each_address_space(
    threads: list[tuple[int, int, int]], chosen: list[int]
) -> None:
    dtype: Any = [("pid", "i4"), ("tgid", "i4"), ("mm", "u8")]
    table = TaskTable(np.array(threads, dtype), frozenset(("pid", "tgid", "mm")))
    assert table["pid"][_first_of_each(table)].tolist() == chosen
