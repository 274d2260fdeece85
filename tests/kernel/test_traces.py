# SPDX-License-Identifier: LGPL-2.1-or-later

import pytest

from fixtures.demo.catalog import DEMOS
from msatools.target import Opened, TargetSpec, open_target
from tests.contract.table import CPUS, LOCKS, PRSTAT, Row
from tests.support.calls import call
from tests.support.overlay import put


@pytest.mark.parametrize(
    ("row", "words"),
    [(PRSTAT, "-L"), (LOCKS, "--stack"), (CPUS, "-v")],
    ids=["prstat", "locks", "cpus"],
)
def test_unknown_unwind_tables_are_a_loss(row: Row, words: str) -> None:
    """As after one flipped bit, or of a kernel with ORC in another format."""
    spec = TargetSpec(path=str(DEMOS["6.12"].core), types="btf")

    def damaged(_: TargetSpec) -> Opened:
        opened = open_target(spec)
        header = opened.prog.symbol("__start_orc_header").address
        put(opened.prog, header, b"\xff" * 20)
        return opened

    ran = call(
        row.command, "dump", "--json", "--strict", *words.split(), opening=damaged
    )
    assert (ran.status, ran.err) == (3, "")
    assert ran.json["coverage"]["unwind_tables_unreadable"] > 0
