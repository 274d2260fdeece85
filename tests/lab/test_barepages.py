# SPDX-License-Identifier: LGPL-2.1-or-later
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fixtures import lab
from tests.memory.truth import having, page_flags

USED = ("BUDDY", "SLAB", "LRU", "ANON", "PGTABLE", "RESERVED", "OFFLINE")


@pytest.fixture(scope="module", params=["6.1", "6.12"])
def run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(f"barepages-{request.param}")


def pages(made: dict[str, Any]) -> npt.NDArray[np.int64]:
    """The page frames of a set, a row a block."""
    first = np.array(made["pfns"], np.int64)
    return first[:, np.newaxis] + np.arange(1 << made["order"])


def test_sets_are_of_all_kinds(run: lab.Run) -> None:
    sets = run.workload["sets"]
    assert {made["content"] for made in sets} == {"code", "objects", "text", "nothing"}
    assert {made["node"] for made in sets} == {0, 1}
    assert {made["compound"] for made in sets} == {False, True}
    assert max(made["order"] for made in sets) >= 6


def test_no_page_is_in_two_blocks(run: lab.Run) -> None:
    every = np.concatenate([pages(made).ravel() for made in run.workload["sets"]])
    assert len(np.unique(every)) == len(every) > 1000


def test_pages_are_nobodys(run: lab.Run) -> None:
    """Of nothing that the kernel would tell by a flag, and no longer free."""
    flags = page_flags(run)
    for made in run.workload["sets"]:
        mine = flags[pages(made)]
        for name in USED:
            assert not having(mine, name).any(), (made["name"], name)
        heads, tails = (having(mine, f"COMPOUND_{part}") for part in ("HEAD", "TAIL"))
        assert heads[:, 0].all() == heads[:, 0].any() == made["compound"]
        assert tails[:, 1:].all() if made["compound"] else not tails.any()


def test_each_page_is_mapped_by_nobody(run: lab.Run) -> None:
    counts = np.frombuffer(run.truth("proc/kpagecount"), np.uint64)
    for made in run.workload["sets"]:
        assert not counts[pages(made)].any()
