# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reports with no debug info are those with it, number for number."""

import json
from typing import Any

import pytest
from drgn import Program

from msatools.memory.memstat import collect_memstat
from msatools.program import TargetSpec, open_target
from msatools.reports.forms import dumps
from msatools.selfdesc import types
from tests.selfdesc.conftest import Pair


def memstat(prog: Program) -> dict[str, Any]:
    report = collect_memstat(prog, by=["node", "zone"], sections=True, verbose=True)
    made: dict[str, Any] = json.loads(dumps(report))
    assert made.pop("scan_ns") > 0
    return made


def assert_same_answers(pair: Pair) -> None:
    expected, found = memstat(pair.dwarf), memstat(pair.btf)
    assert (expected["target"].pop("types"), found["target"].pop("types")) == (
        "dwarf",
        "btf",
    )
    assert found == expected
    assert len(found["checks"]) > 10
    assert found["taken_at_ns"] > 0


def test_memstat(pair: Pair) -> None:
    assert_same_answers(pair)


def test_memstat_after_a_crash(crash_pair: Pair) -> None:
    assert_same_answers(crash_pair)
    assert memstat(crash_pair.btf)["target"]["crash"]["message"]


def test_what_is_refused_is_noted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that can do without a variable must not hide that it had to."""
    table = {n: d for n, d in types.TABLE.items() if n != "socket_file_ops"}
    monkeypatch.setattr(types, "TABLE", table)
    prog = open_target(TargetSpec(path=str(pair.run.elf), types="btf")).prog
    report = memstat(prog)
    found = [c["pages"] for c in report["classes"] if c["name"] == "kernel.sockets"]
    assert found == [0]
    texts = [note["text"] for note in report["notes"]]
    assert any("socket_file_ops is left out: nothing says" in t for t in texts)
