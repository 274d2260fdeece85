# SPDX-License-Identifier: LGPL-2.1-or-later

"""Damaged dumps, chosen at random, end in an answer or in one line."""

import os
from pathlib import Path

from tests.fuzz.__main__ import results
from tests.fuzz.cases import LAYERS
from tests.fuzz.judge import GOOD

CASES = 200
SEED = "test"


def test_damaged_dumps(tmp_path: Path) -> None:
    seeds = [f"{SEED}:{number}" for number in range(CASES)]
    ran = list(results(seeds, tuple(LAYERS), tmp_path, os.cpu_count() or 1))
    assert [result.text for result in ran if result.outcome not in GOOD] == []
    outcomes = {(result.layer, result.outcome) for result in ran}
    assert {layer for layer, outcome in outcomes if outcome != "same"} == {*LAYERS}
    assert {outcome for _, outcome in outcomes} >= {"same", "lossy", "refused"}
