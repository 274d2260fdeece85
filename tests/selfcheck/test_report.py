# SPDX-License-Identifier: LGPL-2.1-or-later

"""What ``--self-check`` prints, refuses and returns, of all commands."""

import re
from functools import cache

import pytest

from msatools import registry
from msatools.render.selfcheck import paste_lines
from msatools.render.selfcheck import selfcheck_blocks as blocks
from msatools.selfcheck.model import (
    KernelFacts,
    SelfCheck,
    SelfCheckReport,
    Software,
    Verdict,
)
from tests.render.screens import check_screens, printed
from tests.support.calls import CORE, GUEST, MADE, Ran, call
from tests.support.golden import Golden

COMMANDS = registry.NAMES


@cache
def said(name: str, *words: str) -> Ran:
    """What a command says of the demo core."""
    return call(registry.load(name), "--self-check", *words, CORE)


each = pytest.mark.parametrize("name", COMMANDS)


@each
def test_status(name: str) -> None:
    """A demo core has no fault: some checks do not apply, none fails."""
    ran = said(name, "--strict")
    assert (ran.status, ran.err) == (0, "")
    assert re.search(r"\n\d+ checks: \d+ ok(, \d+ not applicable)?\n", ran.out)


@each
def test_block_names_nothing_that_runs_there(name: str) -> None:
    found = said(name, "--json").json
    begin, end = said(name).out.split("-- for a bug report")[1].split("\n", 1)
    assert "no names of hosts" in begin
    assert "0x" not in end
    assert CORE not in end
    assert found["target"]["release"] in end
    assert found["software"]["drgn"] in end


@each
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("{core} --budget 5", "--budget: it is for samples"),
        ("--qemu still.sock 5", "--self-check: it is made once, and an interval"),
        ("{core} --record new", "--record: --self-check has no use for it"),
        ("{core} --no-redraw", "--no-redraw: it is for samples"),
        ("--diff a b", "--diff: --self-check has no use for it"),
    ],
)
def test_what_it_does_not_go_with(name: str, words: str, complaint: str) -> None:
    command = registry.load(name)
    if command.operands is not None and words.endswith(" 5"):
        return  # it is an address
    ran = call(command, "--self-check", *words.format(core=CORE).split())
    assert ran.status == 2
    assert complaint in ran.err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("memstat", "--by node"),
        ("memstat", "-j 2"),
        ("prstat", "--load"),
        ("locks", "--chains"),
        ("zombies", "-p 1"),
        ("cpus", "--sets"),
    ],
)
def test_own_options_are_refused(name: str, words: str) -> None:
    ran = call(registry.load(name), "--self-check", *words.split(), CORE)
    assert ran.status == 2
    assert f"{words.split()[0]}: --self-check has no use for it" in ran.err


def test_a_guest_that_stands_still() -> None:
    """A running kernel on which nothing changes is read once."""
    found = call(registry.load("zombies"), "--self-check", "--json", *GUEST).json
    assert found["target"]["live"]
    assert found["readings"] == 1
    assert not [c for c in found["checks"] if c["verdict"] in ("differs", "unknown")]


# --- text

AGREES = SelfCheck(
    name="memory.slabs",
    left="slabs by the scan",
    right="slabs by the caches",
    left_value=12_345,
    right_value=12_345,
    difference=0,
    allowed_least=0,
    allowed_most=0,
    reason=None,
    verdict="ok",
)


def made(name: str, left: int | None, verdict: Verdict, reason: str) -> SelfCheck:
    """Make a check like AGREES with other numbers."""
    return SelfCheck(
        name=name,
        left="some",
        right="others" if left is not None else "",
        left_value=left,
        right_value=7,
        difference=None if left is None else left - 7,
        allowed_least=-3,
        allowed_most=None if verdict == "moved" else 2,
        reason=reason,
        verdict=verdict,
    )


REPORT = SelfCheckReport(
    target=MADE,
    taken_at_ns=None,
    interval_ns=None,
    coverage={"reads": 9, "bytes_read": 99, "tasks_unreadable": 2},
    notes=(),
    command="memstat",
    checks=(
        AGREES,
        made("a.absent", None, "not-applicable", "the kernel has none"),
        made("a.moved", 9, "moved", "changed between 3 readings"),
        made("a.lost", None, "unknown", "cannot be read: 0xffff888012345678"),
        made("a.wrong", 10, "differs", "others are late"),
    ),
    readings=3,
    software=Software(msatools="1.0", drgn="0.3", python="3.13"),
    kernel=KernelFacts(
        paging_levels=None,
        unwinder="drgn",
        cpus_possible=4,
        cpus_online=2,
        nodes_possible=1,
        features={"memcg": True, "psi": False},
        variables_missing=("a_variable",),
        members_missing=("struct rq.scx",),
        members_older={"struct rq.new": "old"},
    ),
)


def test_text(golden: Golden) -> None:
    screens = {"": blocks(REPORT), "-v": blocks(REPORT, verbose=True)}
    check_screens(golden, "selfcheck/failed", screens)


def test_failed_checks_come_first() -> None:
    lines = printed(blocks(REPORT))
    firsts = [line.split()[0] for line in lines[2:6]]
    assert firsts == ["a.wrong", "a.lost", "a.moved", "memory.slabs"]
    block = list(paste_lines(REPORT))
    words = [line.split()[:2] for line in block if line.split()[1].startswith("a.")]
    assert words == [
        ["DIFFERS", "a.wrong:"],
        ["UNKNOWN", "a.lost:"],
        ["MOVED", "a.moved:"],
    ]
    assert "0x..." in "".join(block)
