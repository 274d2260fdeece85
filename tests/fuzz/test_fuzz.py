# SPDX-License-Identifier: LGPL-2.1-or-later

"""Damaged dumps, chosen at random, end in an answer or in one line."""

import os
from contextlib import suppress
from pathlib import Path

from drgn.helpers.linux.pid import for_each_task

from tests.fuzz.__main__ import results
from tests.fuzz.cases import LAYERS, Case
from tests.fuzz.dumps import dump, program
from tests.fuzz.judge import GOOD
from tests.fuzz.memory import put
from tests.fuzz.run import run_case
from tests.fuzz.tables import changed_pages

CASES = 200
SEED = "test"


def test_damaged_dumps(tmp_path: Path) -> None:
    seeds = [f"{SEED}:{number}" for number in range(CASES)]
    ran = list(results(seeds, tuple(LAYERS), tmp_path, os.cpu_count() or 1))
    assert [result.text for result in ran if result.outcome not in GOOD] == []
    outcomes = {(result.layer, result.outcome) for result in ran}
    assert {layer for layer, outcome in outcomes if outcome != "same"} == {*LAYERS}
    assert {outcome for _, outcome in outcomes} >= {"same", "lossy", "refused"}


def test_trees_of_mappings_that_lead_to_themselves(tmp_path: Path) -> None:
    """Lookups of mappings in them did not end."""
    core = "6.12"
    pages: dict[int, bytes] = {}
    for task in for_each_task(program(core)):
        if not task.mm:
            continue
        root = task.mm.mm_mt.ma_root.value_()
        # Some nodes are not in the core.
        with suppress(LookupError):
            put(core, pages, root & ~0xFF, root.to_bytes(8, "little") * 32)
    assert len(pages) > 5
    changed = dump(core, "raw")
    changes = tuple(changed_pages(changed, pages))
    case = Case("made", "memory", changed, "locks", (), changes, is_json=True)
    outcome, run = run_case(case, tmp_path)
    assert outcome in GOOD, run.err
