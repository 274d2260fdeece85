# SPDX-License-Identifier: LGPL-2.1-or-later

"""Completion, in real shells."""

import re
import subprocess
from pathlib import Path

import pytest

from msatools.derived.completions import completions
from msatools.derived.options import Option, options_of, options_of_subcommand
from msatools.registry import GROUPS, NAMES, load, load_group
from tests.support.terminal import Terminal
from tests.support.tools import need

SHARE = completions()

# What is typed -> what Tab makes of it, in every shell.
COMPLETED = {
    "msa-memstat --by pro": "msa-memstat --by process",
    "msa-memstat --by process,fi": "msa-memstat --by process,file",
    "msa-memstat --unatt": "msa-memstat --unattributed",
    "msa-prstat --class LC": "msa-prstat --class LCK",
    "msa-zombies --verdict trac": "msa-zombies --verdict traced",
    "msa-locks --type mutex,rws": "msa-locks --type mutex,rwsem",
    "msa-cpus --types dw": "msa-cpus --types dwarf",
    "msa-cpus vmco": "msa-cpus vmcore-1",
    "msa-cpus -s vmco": "msa-cpus -s vmcore-1",
    "msa-memstat --by node vmco": "msa-memstat --by node vmcore-1",
    "msa-fleet sh": "msa-fleet show",
    "msa-fleet run --sched": "msa-fleet run --scheduler",
    "msa-fleet run vmco": "msa-fleet run vmcore-1",
    "msa-fleet show --new": "msa-fleet show --new-since",
    "msa-fleet show --html vmco": "msa-fleet show --html vmcore-1",
    "msa fle": "msa fleet",
    "msa fleet sq": "msa fleet sql",
    "msa fleet sql --js": "msa fleet sql --json",
    "msa mems": "msa memstat",
    "msa --vers": "msa --version",
    "msa vmco": "msa vmcore-1",
    "msa vmcore-1 --finger": "msa vmcore-1 --fingerprint",
    "msa -v vmco": "msa -v vmcore-1",
    "msa he": "msa help",
    "msa dr": "msa drgn",
    "msa mc": "msa mcp",
    "msa crash vmco": "msa crash vmcore-1",
    "msa help it-ha": "msa help it-hangs",
    "msa help col": "msa help columns",
    "msa memstat --by pro": "msa memstat --by process",
    "msa zombies --verd": "msa zombies --verdict",
    "msa cpus vmco": "msa cpus vmcore-1",
}


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts as they are installed."""
    share = tmp_path_factory.mktemp("share")
    for name, text in SHARE.items():
        path = share / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return share


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one file."""
    folder = tmp_path_factory.mktemp("folder")
    (folder / "vmcore-1").touch()
    return folder


def test_there_is_one_for_each_command() -> None:
    scripts = {"msa", *(f"msa-{name}" for name in (*NAMES, *GROUPS))}
    names: dict[str, set[str]] = {}
    for path in SHARE:
        shell, _, name = path.partition("/")
        names.setdefault(shell, set()).add(Path(name).stem)
    assert names == {"bash-completion": scripts, "fish": scripts, "zsh": {"_msa"}}
    first = SHARE["zsh/site-functions/_msa"].partition("\n")[0]
    assert {*first.split()} == {"#compdef", *scripts}


# --- bash


def bash_reply(share: Path, folder: Path, line: str) -> list[str]:
    """Return what bash offers for the last word of a line."""
    words = line.split(" ")
    script = (
        f". {share}/bash-completion/completions/{words[0]}\n"
        + r"""
    shift
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
    read -r _ _ function _ < <(complete -p "$1")
    "$function" "$1" "${@: -1}" "${@: -2:1}" && printf '%s\n' "${COMPREPLY[@]}"
    """
    )
    done = subprocess.run(
        [need("bash"), "-c", script, "bash", "", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("line", COMPLETED)
def test_bash(share: Path, folder: Path, line: str) -> None:
    assert bash_reply(share, folder, line) == [COMPLETED[line].rpartition(" ")[2]]


@pytest.mark.parametrize("name", NAMES)
def test_bash_offers_all(share: Path, folder: Path, name: str) -> None:
    options = options_of(load(name))
    flags = {flag for option in options for flag in option.flags}
    assert {*bash_reply(share, folder, f"msa-{name} -")} == flags
    assert bash_reply(share, folder, f"msa-{name} ") == ["vmcore-1"]
    for option in options:
        reply = bash_reply(share, folder, f"msa-{name} {option.flags[0]} ")
        assert reply == offered(option), option


def offered(option: Option) -> list[str]:
    if option.names:
        return [*option.names]
    return [] if option.value == "other" else ["vmcore-1"]


def test_bash_offers_no_options_of_others(share: Path, folder: Path) -> None:
    assert bash_reply(share, folder, "msa drgn ") == ["vmcore-1"]
    assert bash_reply(share, folder, "msa crash --finger") == []
    assert bash_reply(share, folder, "msa mcp ") == []


def test_bash_after_an_equals_sign(share: Path, folder: Path) -> None:
    """bash takes it for a word."""
    for last, found in (("= pro", ["process"]), ("=", 11)):
        reply = bash_reply(share, folder, f"msa-memstat --by {last}")
        assert reply == found or len(reply) == found
    assert bash_reply(share, folder, "msa-memstat --by = zone,sl") == ["zone,slab"]


@pytest.mark.parametrize("name", GROUPS)
def test_bash_offers_the_subcommands(share: Path, folder: Path, name: str) -> None:
    group = load_group(name)
    names = [each.name for each in group.subcommands]
    for line in (f"msa-{name}", f"msa {name}"):
        assert bash_reply(share, folder, f"{line} ") == [*names, "--help", "--version"]
        for each in group.subcommands:
            options = options_of_subcommand(group, each)
            flags = {flag for option in options for flag in option.flags}
            # In the file of the front door there are all of them.
            assert {*bash_reply(share, folder, f"{line} {each.name} -")} == flags


# --- shells as they are used


def typed(shell: list[str], setup: str, line: str, folder: Path) -> list[str]:
    """Type a line and Tab; return the words that the shell has then."""
    terminal = Terminal(
        ["env", "-C", str(folder), *shell], PS1="$ ", HOME=str(folder), size=(200, 24)
    )
    # The pattern does not match the line that is typed.
    terminal.press(f"{setup}; echo rea''dy\n")
    terminal.read_until("ready")
    terminal.press(f"{line}\t")
    # The line becomes the arguments of printf, at its beginning.
    terminal.press("\x01printf '<%s>' \x05 '[e''nd]'\n")
    terminal.read_until(r"<\[end\]>")
    terminal.press("exit\n")
    terminal.end()
    found = re.findall("<([^<>%]*)>", terminal.seen)
    return [word for word in found if word != "[end]"]


@pytest.mark.parametrize("line", COMPLETED)
def test_zsh(share: Path, folder: Path, line: str) -> None:
    setup = f"fpath=({share}/zsh/site-functions $fpath); autoload -U compinit"
    words = typed([need("zsh"), "-f", "-i"], f"{setup}; compinit -u -D", line, folder)
    assert words == COMPLETED[line].split()


def test_bash_at_a_prompt(share: Path, folder: Path) -> None:
    setup = f". {share}/bash-completion/completions/msa-memstat"
    line = "msa-memstat --by pro"
    shell = [need("bash"), "--norc", "--noprofile", "-i"]
    assert typed(shell, setup, line, folder) == COMPLETED[line].split()
    assert typed(shell, setup, "msa-memstat --by=pro", folder) == [
        "msa-memstat",
        "--by=process",
    ]


@pytest.mark.parametrize("line", COMPLETED)
def test_fish(share: Path, folder: Path, line: str) -> None:
    words = line.split()
    script = share / f"fish/vendor_completions.d/{words[0]}.fish"
    done = subprocess.run(
        [need("fish"), "-N", "-c", f"source {script}; complete -C {line!r}"],
        cwd=folder,
        env={"HOME": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    found = [each.partition("\t")[0] for each in done.stdout.splitlines()]
    assert found == [COMPLETED[line].rpartition(" ")[2]]
