# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reports in programs, at prompts and in notebooks."""

import builtins
import io
import json
import re
import sys
from html import unescape
from typing import Any

import drgn.cli
import pytest
from msgspec.structs import replace
from rich.console import Console

from msatools.cli.drgn_prompt import run_in_drgn
from msatools.model import Presented
from msatools.registry import NAMES, load
from msatools.render.device import show
from msatools.reports import forms as as_json
from tests.support.calls import CORE, call, demo, with_operands

TAG = re.compile(r"</?(pre|span)( style=\"[^\"<>]*\")?>")


def reported(name: str, *words: str) -> Any:
    """Return the report of a command at drgn's prompt."""
    words = with_operands(load(name), *words)
    return run_in_drgn(load(name), demo().prog, ["--json", *words])


@pytest.fixture(scope="module", params=NAMES)
def report(request: pytest.FixtureRequest) -> Any:
    found = reported(request.param)
    assert isinstance(found, Presented)
    return found


def printed(report: Any, width: int = 500, **words: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=width, **words).print(report)
    return out.getvalue()


def command_of(report: Any) -> str:
    name: str = report.schema.removeprefix("msatools.").removesuffix("/1")
    return name


def test_dict_is_what_json_prints(report: Any) -> None:
    assert report.to_dict() == json.loads(as_json.dumps(report))
    assert [*report.to_dict()][:2] == ["schema", "target"]


def test_repr_is_one_short_line(report: Any) -> None:
    text = repr(report)
    assert text.startswith(f"<{type(report).__name__} of '")
    assert report.target.release in text
    assert text.isprintable()
    assert len(text) <= 120
    assert " load" not in text
    assert repr(replace(report, interval_ns=5)) == text


def test_repr_counts_rows_and_escapes() -> None:
    found = reported("zombies")
    target = replace(found.target, path="a\x1b[1mb", release="6.1\n")
    shown = repr(replace(found, target=target, notes=(), limits=None, groups=()))
    assert shown == r"<ZombiesReport of 'a\x1b[1mb', '6.1\n': no rows>"
    many = replace(found, target=target, notes=(), groups=(), limits=[0] * 1234)
    assert repr(many).endswith(r": 1,234 limits>")


@pytest.mark.parametrize("length", [10, 80, 100, 400])
def test_repr_has_the_end_of_a_long_path(length: int) -> None:
    found = reported("zombies")
    path = "/" + "d" * length + "/vmcore.1"
    text = repr(replace(found, target=replace(found.target, path=path)))
    assert len(text) <= 120
    assert "vmcore.1', '" in text
    assert text.endswith(">")


def text_of(report: Any) -> list[str]:
    """Return the lines that the command prints of a report."""
    out = io.StringIO()
    from msatools.cli.arguments import make_parser

    command = load(command_of(report))
    args = make_parser(command, in_drgn=True).parse_intermixed_args([])
    show(command.blocks(report, args), out)
    return out.getvalue().splitlines()


def test_rich_prints_what_the_command_prints(report: Any) -> None:
    lines = text_of(report)
    assert printed(report).splitlines() == lines
    # As on a terminal, a row is one line.
    cut = [line.rstrip() for line in printed(report, width=40).splitlines()]
    assert cut == [line[:40].rstrip() for line in lines]
    assert "\x1b[1m" in printed(report, force_terminal=True, color_system="standard")


def test_text_is_what_the_command_prints(report: Any) -> None:
    lines = [line.rstrip() for line in text_of(report)]
    assert str(report).splitlines() == lines
    pretty = Printer()
    report._repr_pretty_(pretty, False)
    assert pretty.written.splitlines() == lines


class Terminal(io.StringIO):
    """A terminal, which has the size that the environment says."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_prompt_draws_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value at drgn's prompt is what its command prints there."""
    monkeypatch.setattr(sys, "displayhook", drgn.cli._displayhook)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "30")
    found = reported("memstat")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    sys.displayhook(found)
    assert builtins.__dict__["_"] is found
    lines = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= 60 < max(map(len, str(found).splitlines()))
    assert any(" checks: " in line for line in lines)
    # Others are drgn's, and so is what is written to a file.
    sys.displayhook(5)
    assert terminal.getvalue().endswith("5\n")
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    sys.displayhook(found)
    assert out.getvalue() == f"{found}\n"


class Printer:
    """The methods of IPython's printer that are used."""

    def __init__(self) -> None:
        self.written = ""

    def text(self, line: str) -> None:
        assert "\n" not in line
        self.written += line

    def break_(self) -> None:
        self.written += "\n"


def test_html_has_what_the_command_prints(report: Any) -> None:
    html = report._repr_html_()
    assert html.startswith("<pre")
    assert unescape(TAG.sub("", html)).splitlines() == text_of(report)


def test_html_of_hostile_names() -> None:
    """A task's name is any text."""
    found = reported("prstat")
    row = replace(found.tasks[0], comm="<script>&\x1b")
    html = replace(found, tasks=(row,))._repr_html_()
    assert r"&lt;script&gt;&amp;\x1b" in html
    assert "<" not in TAG.sub("", html)


@pytest.mark.parametrize("name", NAMES)
def test_differences(name: str, tmp_path: Any) -> None:
    file = tmp_path / "report.json"
    file.write_text(call(load(name), CORE, "--json").out)
    found = reported(name, "--diff", str(file), str(file))
    assert isinstance(found, Presented)
    assert found.to_dict() == json.loads(as_json.dumps(found))
    assert repr(found).startswith(f"<{type(found).__name__} of '")
    assert repr(found).count(file.name) == 2
    assert len(repr(found)) <= 120
    assert demo().target.release in printed(found)
    assert demo().target.release in found._repr_html_()


def test_self_check() -> None:
    found = reported("cpus", "--self-check")
    assert found.to_dict()["schema"] == "msatools.selfcheck/1"
    assert "checks" in repr(found)
    assert demo().target.release in printed(found)
    assert "<pre" in found._repr_html_()
