# SPDX-License-Identifier: LGPL-2.1-or-later

"""Forms hold what is printed to what must be so, and to nothing else."""

import re
from pathlib import Path

import pytest

from tests.docs import forms
from tests.docs.forms import KINDS, Form, Formed

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


def test_wordless() -> None:
    assert ROOT.wordless == WAITER.wordless == []
    assert Form(("{n} {n} 1", "a {n}")).wordless == ["{n} {n} 1"]


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="no kind or name 'holder'; there are n,"):
        [*Form(("owner {holder}",)).places("")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_of_one_line_and_not_empty(kind: str) -> None:
    for text in ("", " ", "\n", "ROOT 1\n", PRINTED):
        assert not re.fullmatch(KINDS[kind], text)


NEWER = """\
    900 wm-waiter  D  99us  wm_lock
ROOT 3  pid 7 wm-holder  S  1.0s  blocks 12
  = mutex wm_mutex  owner =7
    901 wm-other   D  98us  wm_lock
    902 wm-waiter  D  97us  wm_lock
    903 wm-waiter  D  96us  wm_lock
"""


def test_renewed_in_the_new_order(scenario: str) -> None:
    """What has no form, and more than is shown, is left out."""
    lines = NEWER.splitlines(keepends=True)
    new = Formed(PRINTED, scenario).renewed(Formed(NEWER, scenario))
    assert new == "".join(lines[:3] + lines[4:5])


def test_renewed_around_what_is_left_out(scenario: str) -> None:
    """The place of the mark stays: a first waiter before the ROOT is another text."""
    lines = PRINTED.splitlines(keepends=True)
    shown = Formed("".join([*lines[:2], "...\n", lines[3]]), scenario)
    assert shown.renewed(Formed(PRINTED, scenario)) == "".join(
        [*lines[:2], "...\n", lines[2]]
    )
    assert shown.renewed(Formed(NEWER, scenario)) is None


def test_nothing_to_renew_it_with(scenario: str) -> None:
    assert Formed(PRINTED, scenario).renewed(Formed("ROOT 1\n", scenario)) is None
