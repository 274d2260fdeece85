# SPDX-License-Identifier: LGPL-2.1-or-later

"""Manual pages."""

import os
import re
import subprocess
from pathlib import Path

import pytest

import msatools
from msatools.cli.arguments import examples_of
from msatools.derived.manuals import manuals
from msatools.derived.options import options_of, options_of_subcommand
from msatools.registry import GROUPS, NAMES, load, load_group
from tests.support.tools import need

PAGES = manuals()
BACKSPACED = re.compile(".\b")


def rendered(page: str, folder: Path) -> str:
    """Return a page as man shows it, in one line, without any warning."""
    path = folder / page
    path.write_text(PAGES[page])
    env = {**os.environ, "MANWIDTH": "100", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        [need("man", "man-db"), "--warnings=w", "-l", path],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return " ".join(BACKSPACED.sub("", done.stdout).split())


def test_there_is_one_for_each_command() -> None:
    assert {*PAGES} == {"msa.1", *(f"msa-{name}.1" for name in (*NAMES, *GROUPS))}


@pytest.mark.parametrize("page", PAGES)
def test_roff_has_no_warnings(page: str) -> None:
    done = subprocess.run(
        [need("groff"), "-man", "-ww", "-Tascii"],
        input=PAGES[page],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert PAGES[page].isascii()


@pytest.mark.parametrize("name", NAMES)
def test_everything_of_a_command_is_shown(name: str, tmp_path: Path) -> None:
    command = load(name)
    shown = rendered(f"msa-{name}.1", tmp_path)
    assert f"NAME msa-{name} - {command.summary} SYNOPSIS msa-{name} [" in shown
    for option in options_of(command):
        flags = ", ".join(option.flags)
        assert " ".join((flags, *option.metavars, option.help)) in shown
    for words, what in examples_of(command, in_drgn=False):
        assert " ".join(f"msa-{name} {words} {what}".split()) in shown
    others = sorted(f"msa-{other}(1)" for other in NAMES if other != name)
    assert f"SEE ALSO msa(1), {', '.join(others)} msatools" in shown


def test_the_front_door_lists_all_commands(tmp_path: Path) -> None:
    shown = rendered("msa.1", tmp_path)
    commands = " ".join(
        f"{name} {command.summary}"
        for name, command in (
            *((name, load(name)) for name in NAMES),
            *((name, load_group(name)) for name in GROUPS),
        )
    )
    assert f"COMMANDS {commands} EXAMPLES msa vmcore " in shown
    assert "SYNOPSIS msa [OPTION...] [TARGET] msa COMMAND [" in shown
    assert shown.endswith(f"msatools {msatools.__version__} MSA(1)")


@pytest.mark.parametrize("name", GROUPS)
def test_everything_of_subcommands_is_shown(name: str, tmp_path: Path) -> None:
    group = load_group(name)
    shown = rendered(f"msa-{name}.1", tmp_path)
    assert f"NAME msa-{name} - {group.summary} SYNOPSIS msa-{name} " in shown
    for each in group.subcommands:
        _, _, part = shown.partition(
            f" msa-{name} {each.name} {each.summary[:1].upper()}"
        )
        for option in options_of_subcommand(group, each):
            assert ", ".join(option.flags) in part
            assert option.help in part
        for words, what in each.examples:
            assert f"msa-{name} {each.name} {words}" in shown
            assert what in shown
