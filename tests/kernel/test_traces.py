# SPDX-License-Identifier: LGPL-2.1-or-later

from typing import NoReturn, cast

import pytest
from drgn import Object, Program

from fixtures.demo.catalog import DEMOS
from msatools.kernel.code import stack_trace
from msatools.kernel.report import _LOGS, LossLog, logs_of
from msatools.program import Opened, TargetSpec, open_target
from tests.contract.table import CPUS, LOCKS, PRSTAT, Row
from tests.support.calls import Open, call
from tests.support.overlay import put


@pytest.mark.parametrize(
    ("row", "words"),
    [(PRSTAT, "-L"), (LOCKS, "--stacks"), (CPUS, "-v")],
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


def test_other_errors_are_a_loss() -> None:
    """libkdumpfile has no registers if notes are lost, which drgn raises as it is."""
    losses = LossLog()

    class Lacking:
        def __init__(self) -> None:
            self.cache = {_LOGS: [losses]}

        def stack_trace(self, task: object) -> NoReturn:
            raise Exception("Key has no value")

    prog = cast(Program, Lacking())
    assert logs_of(prog) == [losses]
    assert stack_trace(prog, cast(Object, None)) is None
    assert losses.coverage["unwind_tables_unreadable"] == 1
