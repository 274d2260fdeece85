# SPDX-License-Identifier: LGPL-2.1-or-later

"""Sessions of drgn on the kernel that they run on, inside of a guest."""

import json
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab.inside import RESULTS

ONE_LINE = (
    "warning: msatools: no debug info is loaded; types and symbols are the kernel"
)


@pytest.fixture(scope="module", params=["6.1", "6.12"])
def facts(request: pytest.FixtureRequest) -> dict[str, Any]:
    run = lab.build(f"drgnlive-{request.param}")
    found: dict[str, Any] = json.loads((run.directory / RESULTS).read_text())
    return found


@pytest.mark.parametrize("name", ["drgn", "msa drgn"])
def test_lookups(facts: dict[str, Any], name: str) -> None:
    """What drgn finds is what /proc says."""
    session, told = facts[name], facts["told"]
    assert session["status"] == 0, session["err"]
    task, kernel, modules, frames = session["out"].splitlines()
    assert task == f"{told['comm']} {told['pid']} 64"
    assert kernel == f"{told['release']} {told['cpus']}"
    assert modules.split() == sorted([*told["modules"], "kernel"])
    assert {"schedule", "hrtimer_nanosleep"} & {*frames.split()}


def test_one_line_says_where_types_are_from(facts: dict[str, Any]) -> None:
    (line,) = facts["drgn"]["err"].splitlines()
    assert line.startswith(ONE_LINE)
    assert facts["msa drgn"]["err"] == ""


def test_never(facts: dict[str, Any]) -> None:
    session = facts["never"]
    assert session["status"] == 1
    assert "msatools" not in session["err"]


def test_second_report_is_not_the_first(facts: dict[str, Any]) -> None:
    """A child dies between two calls of one command in one session."""
    session = facts["twice"]
    assert session["status"] == 0, session["err"]
    first, second = map(int, session["out"].split())
    assert second == first + 1


def test_hint(facts: dict[str, Any]) -> None:
    session = facts["hint"]
    assert session["status"] == 1
    last = session["err"].splitlines()[-1]
    assert "nothing says the type of loops_per_jiffy: load the kernel's debug" in last
    assert "/msatools/" not in session["err"]


def test_crash_command(facts: dict[str, Any]) -> None:
    session = facts["msa crash"]
    assert (session["status"], session["err"]) == (0, "")
    assert f" {facts['told']['asleep']} " in session["out"]
    assert session["out"].rstrip().endswith("python3")
