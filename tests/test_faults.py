# SPDX-License-Identifier: LGPL-2.1-or-later

"""Faults of msatools are reported as its own, never as the kernel's or the user's.

A fault is put into a collector, a renderer and a rule of msa-report, in one run, in an
interval and at drgn's prompt.
"""

import re
from collections.abc import Callable, Iterable
from importlib import import_module
from itertools import count, cycle
from typing import Any, NoReturn

import pytest
from drgn import FaultError, Program
from drgn.commands import CommandError
from msgspec.structs import replace

from msatools import report as report_package
from msatools.cli.drgn_prompt import run_in_drgn
from msatools.errors import (
    EXIT_FAULT,
    LOST,
    DamagedDataError,
    MissingMemberError,
    MissingSymbolError,
    MissingTypeError,
    fault_of,
)
from msatools.kernel.code import function_name
from msatools.kernel.reader import Reader
from msatools.registry import load
from msatools.report.model import SECTIONS
from msatools.selfdesc.find import (
    ask,
    ask_each,
    drgn_lookups,
    find_constant,
    find_symbol,
    find_type,
    find_variable,
    member_of,
    object_at,
    offset_of,
    pointer_to,
)
from tests.contract.table import ROWS, Row
from tests.support.calls import CORE, GUEST, Ran, call, demo
from tests.support.probe import COMMAND as PROBE
from tests.support.probe import DUMP

report_module = import_module(f"{report_package.__name__}.report")

ERRORS = (KeyError("pid"), IndexError("pid"), TypeError("pid"), ValueError("pid"))
RENDERED = ("memstat", "prstat", "locks", "zombies", "cpus", "report", "whatis")

each_error = pytest.mark.parametrize("error", ERRORS, ids=lambda it: type(it).__name__)
each_command = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def again(error: Exception) -> Exception:
    """Return the error without the places where it was raised before."""
    return error.with_traceback(None)


def raising(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise again(error)

    return fail


SEND = "run it again with --debug, and send its authors what that prints"
SEND_FROM_PROMPT = "send its authors this, and the traceback above"


def told_as_ours(
    text: str, error: Exception, name: str, place: str, send: str = SEND
) -> None:
    """Check the line about a fault: its place, and what to send."""
    said = re.escape(f"{type(error).__name__}: {error}")
    assert re.fullmatch(
        rf"{re.escape(name)}: a fault of msatools \S+, at msatools/{place}\.py:\d+: "
        rf"{said}; {send}\n",
        text,
    ), text


# --- in a collector


@each_error
@each_command
def test_in_a_collector(
    row: Row, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reader, "__init__", raising(error))
    ran = call(row.command, CORE)
    assert (ran.status, ran.out) == (EXIT_FAULT, "")
    told_as_ours(ran.err, error, f"msa-{row.name}", r"[a-z_/]+")


@pytest.mark.parametrize("error", [KeyError("pid"), ValueError("pid")], ids=repr)
@each_command
def test_deep_in_a_collector(
    row: Row, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No clause takes it for a loss, wherever it is."""
    read = Reader.read
    for nth in (0, 30, 300):
        reads = count()

        def fail_once(
            self: Reader, *args: Any, nth: int = nth, reads: Any = reads, **options: Any
        ) -> bytes:
            if next(reads) == nth:
                raise again(error)
            return read(self, *args, **options)

        monkeypatch.setattr(Reader, "read", fail_once)
        ran = call(row.command, "--json", CORE)
        if next(reads) <= nth:
            break  # it reads less
        assert ran.status == EXIT_FAULT, (nth, ran.err)
        assert f"{type(error).__name__}: {error}; run it again" in ran.err
        assert bool(ran.out) == (row.name == "report")


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    error = KeyError("pid")
    monkeypatch.setattr(Reader, "__init__", raising(error))
    ran = call(load("prstat"), CORE, "--debug")
    *traceback, line = ran.err.splitlines(keepends=True)
    assert traceback[0] == "Traceback (most recent call last):\n"
    assert traceback[-1] == "KeyError: 'pid'\n"
    assert ran.status == EXIT_FAULT
    told_as_ours(line, error, "msa-prstat", "kernel/report")


def test_place_is_the_innermost_of_ours() -> None:
    """Not that of a library that was called, nor of what calls drgn for all."""
    prog = demo().prog
    with pytest.raises(TypeError) as caught:
        function_name(prog, None)  # type: ignore[arg-type]
    assert fault_of(caught.value).text.startswith("msatools/kernel/code.py:")


# --- in a renderer


@each_error
@pytest.mark.parametrize("name", RENDERED)
def test_in_a_renderer(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = import_module(f"msatools.render.{name}.report")
    monkeypatch.setattr(renderer, "header", raising(error))
    ran = call(load(name), CORE)
    assert (ran.status, ran.out) == (EXIT_FAULT, "")
    told_as_ours(ran.err, error, f"msa-{name}", f"render/{name}/[a-z_]+")


# --- in msa-report, where the others still answer


@pytest.mark.parametrize(
    ("name", "error"), [*zip(SECTIONS, cycle(ERRORS), strict=False)]
)
def test_in_a_section(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_module, f"collect_{name}", raising(error))
    ran = call(load("report"), "--json", "--strict", CORE)
    assert ran.status == EXIT_FAULT
    told_as_ours(ran.err, error, "msa-report", "report/report")
    sections = ran.json["sections"]
    said = f": {type(error).__name__}: {error}"
    assert sections[name]["error"].startswith("a fault of msatools")
    assert sections[name]["error"].endswith(said)
    assert all(sections[other]["summary"] for other in SECTIONS if other != name)
    assert [note["code"] for note in ran.json["notes"]].count("fault") == 1
    text = call(load("report"), CORE)
    assert f"{name}: " in text.out
    assert text.out.count(said) == 2  # the section, and the note
    assert text.status == EXIT_FAULT


@each_error
def test_in_a_rule(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs the verdicts of that rule alone."""
    whole = call(load("report"), "--json", CORE).json
    codes = [verdict["code"] for verdict in whole["verdicts"]]
    for part in ("when", "see"):
        rules = [
            replace(rule, **{"when": lambda _: [None], part: raising(error)})
            if rule.code == "zombies"
            else rule
            for rule in report_module.RULES
        ]
        monkeypatch.setattr(report_module, "RULES", rules)
        ran = call(load("report"), "--json", CORE)
        assert ran.status == EXIT_FAULT
        told_as_ours(ran.err, error, "msa-report", r"report/rule")
        found = [verdict["code"] for verdict in ran.json["verdicts"]]
        assert found == [code for code in codes if code != "zombies"]
        assert ran.json["unchecked"] == ["zombies"]
        assert ran.json["checked"] == whole["checked"] - 1
        assert ran.json["sections"] == whole["sections"]


@pytest.mark.parametrize(
    "name",
    ["read_log", "parse_events", "find_crash", "read_machine", "last_lines", "section"],
)
def test_in_the_rest_of_the_report(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, name, raising(KeyError("pid")))
    ran = call(load("report"), "--json", CORE)
    assert ran.status == EXIT_FAULT
    assert set(ran.err.splitlines()) == {ran.err.splitlines()[0]}
    assert ran.json["taken_at_ns"] is not None


# --- in an interval, and at drgn's prompt


@each_error
def test_in_an_interval(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not tried again, as data that a running kernel changed are."""
    calls = []

    def fail(*_: object) -> NoReturn:
        calls.append(1)
        raise again(error)

    # The first report is the start of the first interval.
    prstat = import_module("msatools.prstat.prstat")
    monkeypatch.setattr(prstat.Prstat, "advance", fail)
    ran = call(load("prstat"), *GUEST, "0.01", "3", "--json")
    assert (ran.status, ran.out, len(calls)) == (EXIT_FAULT, "", 1)
    told_as_ours(ran.err, error, "msa-prstat", "cli/execution")


@each_error
@pytest.mark.parametrize("where", ["collector", "renderer"])
def test_at_drgns_prompt(
    where: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "collector":
        monkeypatch.setattr(Reader, "__init__", raising(error))
    else:
        renderer = import_module("msatools.render.prstat.report")
        monkeypatch.setattr(renderer, "header", raising(error))
    with pytest.raises(CommandError) as caught:
        run_in_drgn(load("prstat"), demo().prog, [])
    said = f"{caught.value}\n"
    told_as_ours(said, error, "%prstat", r"[a-z_/]+", SEND_FROM_PROMPT)
    assert caught.value.__cause__ is error


def test_report_at_drgns_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = KeyError("pid")
    monkeypatch.setattr(report_module, "collect_locks", raising(error))
    with pytest.raises(CommandError) as caught:
        run_in_drgn(load("report"), demo().prog, [])
    said, shown = f"{caught.value}\n", capsys.readouterr()
    told_as_ours(said, error, "%report", "report/report", SEND_FROM_PROMPT)
    assert "prstat: " in shown.out
    assert shown.err.endswith("KeyError: 'pid'\n")


# --- what is no fault


def lookups(prog: Program) -> Iterable[tuple[Callable[[], object], type[Exception]]]:
    task = find_type(prog, "struct task_struct")
    init = find_variable(prog, "init_task")
    yield lambda: find_type(prog, "struct nothing"), MissingTypeError
    yield lambda: object_at(prog, "struct nothing", 8), MissingTypeError
    yield lambda: pointer_to(prog, "struct nothing", 8), MissingTypeError
    yield lambda: find_variable(prog, "nothing"), MissingSymbolError
    yield lambda: find_constant(prog, "NO_SUCH_NAME"), MissingSymbolError
    yield lambda: find_symbol(prog, "nothing"), MissingSymbolError
    yield lambda: find_symbol(prog, 1 << 40), MissingSymbolError
    yield lambda: member_of(task, "nothing"), MissingMemberError
    yield lambda: offset_of(task, "nothing"), MissingMemberError
    yield lambda: offset_of(task, "children.nothing"), MissingMemberError
    yield lambda: ask(prog.variable, "nothing"), MissingSymbolError
    yield lambda: ask(lambda: init.nothing), MissingMemberError
    yield lambda: ask(lambda: init.pid / 0), DamagedDataError
    yield lambda: ask(lambda: init.comm[1 << 70]), DamagedDataError
    yield (
        lambda: list(ask_each(lambda: (init.comm[n] for n in (1 << 70,)))),
        (DamagedDataError),
    )
    yield lambda: prog.read(0, 8) and None, FaultError


def test_what_drgn_raises() -> None:
    for look_up, expected in lookups(demo().prog):
        with pytest.raises(expected) as caught:
            look_up()
        assert isinstance(caught.value, LOST)
        assert not isinstance(caught.value, LookupError)


@each_error
def test_what_python_raises(error: Exception) -> None:
    """Nor does it become something else within a lookup."""
    with pytest.raises(type(error)) as caught, drgn_lookups:
        raise again(error)
    assert caught.value is error
    assert not isinstance(error, LOST)


@each_error
def test_what_the_caller_of_a_helper_raises(error: Exception) -> None:
    def call_helper() -> None:
        for _ in ask_each(range, 3):
            raise again(error)

    with pytest.raises(type(error)) as caught:
        call_helper()
    assert caught.value is error


def test_probe_that_fails_is_ours() -> None:
    ran: Ran = call(PROBE, DUMP, "--fail")
    assert ran.status == EXIT_FAULT
