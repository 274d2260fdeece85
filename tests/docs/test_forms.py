# SPDX-License-Identifier: LGPL-2.1-or-later

"""Forms hold what is printed to what must be so, and to nothing else."""

from pathlib import Path

import pytest

from tests.docs import forms
from tests.docs.forms import Form, Formed

ROOT = Form(
    (
        "ROOT {n} pid {n as holder} wm-holder {D|S} {time} blocks {n}",
        "= mutex wm_mutex owner ={holder}",
    )
)
WAITER = Form(("{n} wm-waiter D {time} {function}",))
PRINTED = """\
ROOT 1  pid 190 wm-holder  D 40.5s  blocks 2
  = mutex wm_mutex  owner =190
      9 wm-waiter  D 2m05s  __flush_work
     12 wm-waiter  D    4ms  wm_lock
"""


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A scenario with those two forms."""
    text = f"# It holds a mutex.\n{ROOT}\n\n\n{WAITER}\n"
    (tmp_path / "made.txt").write_text(text)
    monkeypatch.setattr(forms, "FORMS", tmp_path)
    forms.forms_of.cache_clear()
    return "made"


def test_places(scenario: str) -> None:
    formed = Formed(PRINTED, scenario)
    places = {ROOT: [range(2)], WAITER: [range(2, 3), range(3, 4)]}
    assert formed.places == places
    assert formed.lines_of(1) == PRINTED.splitlines()


@pytest.mark.parametrize(
    ("word", "other"),
    [
        ("=190", "=191"),
        ("wm-holder", "wm-waiter"),
        ("mutex wm", "rwsem wm"),
        ("D 40.5s", "R 40.5s"),
        ("40.5s", "-"),
        ("blocks 2", "blocks 2 more"),
        ("pid 190", "pid 0x190"),
        ("\n  = ", "\n\n  = "),
    ],
)
def test_says_no_to_another(scenario: str, word: str, other: str) -> None:
    assert word in PRINTED
    formed = Formed(PRINTED.replace(word, other, 1), scenario)
    assert [*formed.places] == [WAITER]
    assert formed.lacks(Formed(PRINTED, scenario)) == [ROOT]


def test_lines_without_a_form(scenario: str) -> None:
    text = PRINTED + "\n...\nHERD  300 x futex\n"
    assert Formed(text, scenario).lines_of(0) == ["HERD  300 x futex"]


def test_lacks_what_is_shown_more_often(scenario: str) -> None:
    fewer = PRINTED.rpartition("     12")[0]
    assert Formed(fewer, scenario).lacks(Formed(PRINTED, scenario)) == [WAITER]
    assert Formed(PRINTED, scenario).lacks(Formed(fewer, scenario)) == []
