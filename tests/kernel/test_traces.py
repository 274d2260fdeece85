# SPDX-License-Identifier: LGPL-2.1-or-later

from typing import NoReturn

import pytest
from drgn import Object, Program

from fixtures.demo.catalog import DEMOS
from msatools.kernel import traces
from msatools.kernel.report import LossLog
from msatools.kernel.traces import stack_trace
from msatools.target import Opened, TargetSpec, open_target
from tests.contract.table import CPUS, LOCKS, PRSTAT, Row
from tests.support.calls import Open, call
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

    assert_loss(row, words, damaged)


def assert_loss(row: Row, words: str, opening: Open) -> None:
    ran = call(
        row.command, "dump", "--json", "--strict", *words.split(), opening=opening
    )
    assert (ran.status, ran.err) == (3, "")
    assert ran.json["coverage"]["unwind_tables_unreadable"] > 0


def test_other_errors_are_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """libkdumpfile has no registers if notes are lost, which drgn raises as it is."""

    class Lacking(Program):
        def stack_trace(self, *_: object) -> NoReturn:
            raise Exception("Key has no value")

    losses = LossLog()
    prog = Lacking()
    monkeypatch.setattr(traces, "logs_of", lambda _: [losses])
    assert stack_trace(prog, Object(prog, prog.int_type("int", 4, True), 1)) is None
    assert losses.coverage["unwind_tables_unreadable"] == 1
