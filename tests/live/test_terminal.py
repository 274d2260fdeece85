# SPDX-License-Identifier: LGPL-2.1-or-later

"""The redrawn screen in a terminal that is tmux's, inside of a guest.

``fixtures/lab/guest/liveterminal.py`` runs msa-prstat and msa-memstat there, changes
the terminal's size, presses keys, and keeps what was to be seen.
"""

import json
import re
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab.guest.liveterminal import PROMPT, SIZES
from fixtures.lab.inside import RESULTS

Facts = dict[str, Any]
REDRAWN = (*SIZES, "memstat", "resumed")
"""Screens that show a sample."""

LEFT = {"quit": "prstat", "interrupted": "memstat"}
"""Screens after a command has ended, by the key of that name."""

COMMANDS = {
    **dict.fromkeys((*SIZES, "quit"), "prstat"),
    **dict.fromkeys(("memstat", "suspended", "resumed", "interrupted"), "memstat"),
}
HEADER = "{release}  live  types: btf"


@pytest.fixture(scope="module", params=["6.1", "6.12"])
def run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(f"kcore-{request.param}")


@pytest.fixture(scope="module")
def facts(run: lab.Run) -> Facts:
    found: Facts = json.loads((run.directory / RESULTS).read_text())["terminal"]
    return found


@pytest.fixture(scope="module")
def header(run: lab.Run) -> str:
    return HEADER.format(release=run.release)


def footer(name: str) -> str:
    """As far as the smallest screen has it."""
    return rf"\d\d:\d\d:\d\d; msa-{name}: [\d.]+ s CPU, [\d.]+ % of one"


@pytest.mark.parametrize("name", REDRAWN)
def test_sample_fills_the_screen(facts: Facts, header: str, name: str) -> None:
    """The header is at the top, the footer on the last line, and no line wraps."""
    screen = facts["screens"][name]
    assert screen["alternate"]
    assert (screen["width"], screen["height"]) == SIZES.get(name, SIZES["first"])
    lines = screen["lines"]
    assert len(lines) == screen["height"]
    assert lines[0].startswith(header)
    pattern = footer(COMMANDS[name])
    assert re.match(pattern, lines[-1])
    # Where a line went on in the next, these would be one.
    assert len(screen["joined"]) == len(lines)
    assert max(map(len, lines)) <= screen["width"]


@pytest.mark.parametrize("name", REDRAWN)
def test_footer_says_how_to_quit(facts: Facts, name: str) -> None:
    assert re.search(r"  q quits(  \? keys|, \?)$", facts["screens"][name]["lines"][-1])


def test_as_much_is_shown_as_there_is_room_for(facts: Facts) -> None:
    screens = facts["screens"]
    # A guest has more tasks than the smallest has lines.
    assert all(screens["small"]["lines"])
    filled = {name: sum(map(bool, screens[name]["lines"])) for name in SIZES}
    assert filled["small"] < filled["first"] < filled["large"]


def test_it_fits_before_the_next_sample(facts: Facts) -> None:
    """After a change of size: the time and the cost are those of the sample before."""
    lasts = [facts["screens"][name]["lines"][-1] for name in SIZES]
    samples = [re.match(footer("prstat"), last) for last in lasts]
    assert len({sample[0] for sample in samples if sample}) == 1


@pytest.mark.parametrize("name", LEFT)
def test_last_sample_is_left_on_the_normal_screen(
    facts: Facts, header: str, name: str
) -> None:
    """And under it the shell waits for the next command."""
    screen = facts["screens"][name]
    assert not screen["alternate"]
    lines = [line for line in screen["lines"] if line]
    assert lines[-1] == PROMPT.rstrip()
    heads = [number for number, line in enumerate(lines) if line.startswith(header)]
    assert len(heads) == 1
    below = lines[heads[0] :]
    assert len(below) > 5
    # No line of it was wrapped; of those above some are older than the last resizing.
    joined = [line.rstrip() for line in screen["joined"] if line.strip()]
    assert joined[-len(below) :] == below


def test_ends_with_status_0(facts: Facts) -> None:
    assert facts["statuses"] == ["0", "0"]


def test_shell_has_the_terminal_while_it_is_stopped(facts: Facts) -> None:
    screen = facts["screens"]["suspended"]
    assert not screen["alternate"]
    assert any("Stopped" in line for line in screen["lines"])


def test_modes_are_as_they_were(facts: Facts) -> None:
    """After q, Ctrl-Z and Ctrl-C; the size is told with them, and has changed."""
    modes = [re.sub(r"(rows|columns) \d+;", "", text) for text in facts["modes"]]
    assert len(modes) == 4
    assert set(modes) == {modes[0]}
    assert re.search(r"(?<!-)\becho\b", modes[0])
    assert re.search(r"(?<!-)\bicanon\b", modes[0])
