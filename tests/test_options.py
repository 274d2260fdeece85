# SPDX-License-Identifier: LGPL-2.1-or-later

"""One vocabulary of options, and no option that is ignored because of another.

Every pair of a command's options is tried on the demo core: it is refused, or the
output differs from that of either option alone.
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import pytest
from drgn.helpers.linux.pid import find_task

from msatools.cli.arguments import make_parser
from msatools.cpus.cpus import CpusOptions, choose
from msatools.program import Opened, TargetSpec, open_target
from msatools.render.cpus.report import cpus_blocks as blocks
from tests.contract.table import ROWS, Row
from tests.cpus.madecpus import cpu, cpuset, report
from tests.render.screens import printed
from tests.support import overlay
from tests.support.calls import CORE, as_named, call

# --- one vocabulary

LETTERS = {
    "-k": "kernel",
    "-c": "core",
    "-s": "vmlinux",
    "-p": "pids",
    "-P": "cpus",
    "-u": "users",
    "-n": "rows",
    "-o": "columns",
    "-v": "verbose",
    "-j": "workers",
    "-h": "help",
    "-m": "microstates",
    "-L": "threads",
    "-a": "by_user",
    "-Z": "by_cgroup",
    "-i": "view",
    "-F": "hz",
}
"""What each letter means, whatever the command."""


def test_letters_mean_one_thing() -> None:
    for row in ROWS:
        for action in make_parser(row.command, in_drgn=False)._actions:
            for option in action.option_strings:
                if not option.startswith("--"):
                    assert LETTERS[option] == action.dest, (row.name, option)


def test_names_mean_one_thing() -> None:
    """An option takes the same kind of value in all commands that have it."""
    found: dict[str, set[tuple[str, object]]] = {}
    for row in ROWS:
        for action in make_parser(row.command, in_drgn=False)._actions:
            for option in action.option_strings:
                taken = action.metavar or (action.choices and "CHOICE")
                found.setdefault(option, set()).add((action.dest, taken))
    several = {option: taken for option, taken in found.items() if len(taken) > 1}
    # What there is to group differs: one thing by one key, or sums by several. Stacks
    # are a view of their own, or added to another.
    # What leaks is memory of modules, or the dead.
    assert several.keys() == {"--by", "--stacks", "--leaks"}
    assert {dest for dest, _ in several["--by"]} == {"by"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_all_rows_can_be_limited(row: Row) -> None:
    # A command with words of its own answers each of them.
    assert "-n" in row.options or row.command.operands is not None


# --- combinations


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Options of a command, each with a value that changes what the demo shows."""

    selecting: tuple[str, ...] = ()
    """Those that select: each narrows what others select, so they go together."""

    others: tuple[str, ...]
    untried: Mapping[str, str] = field(default_factory=dict)
    """Options that change nothing here, and why."""

    alike: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Pairs of which the first changes nothing here, and why."""


def with_json(*options: str) -> dict[tuple[str, str], str]:
    """Return pairs of ``--json`` and an option that asks for what JSON always has."""
    return {(option, "--json"): "JSON has it as it is" for option in options}


TRIED = {
    "cpus": Tried(
        selecting=("-P 0",),
        others=(
            *(
                "-i",
                "--sets",
                "--info",
                "--stalls",
                "--stacks",
                "--plan 1",
                "-o cpu,usr",
                "-n 1",
            ),
            *("-v", "--json"),
        ),
        untried={"--set": "all CPUs of the demo are in one set"},
        alike={("-n 1", "-P 0"): "one CPU is one row"},
    ),
    "locks": Tried(
        selecting=("-p 220", "--state D", "--min-age 15978ms"),
        others=(
            *("--by lock", "--by task", "--chains", "--holders", "--dot", "--stacks"),
            *("--io", "--workqueues", "-n 1", "-v", "--json"),
        ),
        untried={
            "--type": "all waits of the demo are for futexes",
            **dict.fromkeys(
                ("--cgroup", "--container", "--ns"),
                "all waits of the demo are of one process",
            ),
        },
        alike={
            ("--stacks", "-p 220"): "it waits for nobody known",
            ("-n 1", "-p 220"): "it is one row",
            ("--stacks", "--holders"): "nobody holds a lock",
            ("-n 1", "--holders"): "nobody holds a lock",
            **dict.fromkeys(
                [("-n 1", each) for each in ("--state D", "--min-age 15978ms", "-v")],
                "there is no root",
            ),
            ("-n 1", "--stacks"): "there is no root",
            ("-n 1", "--io"): "nothing is in flight",
            ("-n 1", "--workqueues"): "no pool has anything to do",
            **with_json("--by lock", "--by task", "--chains", "--holders", "-v"),
        },
    ),
    "memstat": Tried(
        others=(
            *("--by order", "--by node", "-n 2", "--sections", "--frag", "--map"),
            *("-v", "--json"),
        ),
        untried={
            "-j": "it changes how long the scan takes",
            "--textfile": "it writes a file, and what it prints is the same",
            "--unattributed": "it reads pages that the demo lacks",
            "--leaks": "it reads pages that the demo lacks",
        },
    ),
    "prstat": Tried(
        selecting=("-p 1,204,210", "--class SIG"),
        others=(
            *("-m", "-L", "-a", "-Z", "--by comm", "--by user", "--sort RSS", "-n 1"),
            *("-o pid,cpu", "--children", "--states", "--load", "--stacks"),
            *("--folded age", "--stacks --function do_nanosleep", "-v"),
            "--json",
        ),
        untried={
            **dict.fromkeys(
                ("-u", "--cgroup", "--container", "--ns", "-P", "--state", "--min-age"),
                "it selects as --class does",
            ),
            **dict.fromkeys(
                ("--max-age", "--kernel-threads", "--user-tasks"),
                "it selects as --class does",
            ),
            "--module": "it is --function by another name of a function",
            "-F": "it needs an interval",
        },
        alike={
            ("-n 1", "--stacks --function do_nanosleep"): "there is one such stack",
            **with_json("-m", "-v"),
        },
    ),
    "whatis": Tried(
        others=("-v", "--json"),
        untried={"--waits": "nobody waits for a lock there"},
        alike=with_json("-v"),
    ),
    "report": Tried(
        selecting=(),
        others=("--full", "--fingerprint", "-n 1", "-v", "--json"),
        untried=dict.fromkeys(
            ("--html", "--textfile"), "it writes a file, and what it prints is the same"
        ),
        alike={
            ("-n 1", "--full"): "there is one verdict",
            ("-n 1", "-v"): "there is one verdict",
            **with_json("-v"),
        },
    ),
    "zombies": Tried(
        selecting=("-p 203", "--parent 1", "--cgroup /service", "-u 1000"),
        others=(
            *("--by user", "--by verdict", "--tree", "--leaks", "-n 1", "--cost"),
            *("-v", "--json"),
        ),
        untried={
            "--ns": "all tasks of the demo are in the same namespaces",
            "--container": "no task of the demo is in a container",
            "--verdict": "the dead of this test have one verdict",
            "--min-age": "it selects as -u does",
        },
        alike={
            **dict.fromkeys(
                [
                    ("-n 1", each)
                    for each in (
                        *("--parent 1", "--cgroup /service", "-u 1000", "--tree"),
                        *("--by verdict", "--leaks"),
                    )
                ],
                "there is one row",
            ),
            **with_json("-v"),
        },
    ),
}
VARYING = re.compile(
    r"scanned in \S+|\d+ reads|bytes, \S+s$|\"(scan_ns|reads|elapsed_ns)\": \d+",
    re.MULTILINE,
)


def tried_of(row: Row) -> Tried:
    """Return the options to try: of a command that is not listed, those of its row."""
    words = re.sub(r" (?=-)", "\n", "\n".join(row.asked)).splitlines()
    options = tuple(dict.fromkeys((*words, "-v", "--json")))
    return TRIED.get(row.name) or Tried(others=options, alike=with_json("-v"))


@cache
def opened() -> Opened:
    """Return the demo core with dead and blocked tasks.

    Two children of init are dead, and one of kthreadd; one of them is another user's.
    """
    found = open_target(TargetSpec(path=CORE, types="btf"))
    for pid in (44, 203, 206, 216):
        state = find_task(found.prog, pid).exit_state
        overlay.put(found.prog, state.address_, (0x20).to_bytes(4, "little"))
    for pid in (218, 219):
        state = find_task(found.prog, pid).member_("__state")
        overlay.put(found.prog, state.address_, (2).to_bytes(4, "little"))
    for name in ("cred", "real_cred"):
        uid = getattr(find_task(found.prog, 206), name).uid.val
        overlay.put(found.prog, uid.address_, (1000).to_bytes(4, "little"))
    return found


@cache
def shown(name: str, *options: str) -> str | None:
    """Return what a command prints with some options; ``None`` if it refuses them."""
    (row,) = (row for row in ROWS if row.name == name)
    words = " ".join(options).split()
    found = opened()
    ran = call(
        row.command,
        *words,
        CORE,
        opening=lambda spec: Opened(found.prog, as_named(found.target, spec)),
    )
    if ran.status == 2:
        line = rf"msa-{name}: (argument )?-\S+.*: .*; see msa-{name} --help\n"
        assert re.fullmatch(line, ran.err), ran.err
        return None
    assert (ran.status, ran.err) == (0, ""), words
    return VARYING.sub("#", ran.out)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_no_option_is_ignored(row: Row) -> None:
    """Each of two options has an effect besides the other, or they are refused."""
    tried = tried_of(row)
    options = (*tried.selecting, *tried.others)
    ignored = set()
    for pair in itertools.combinations(options, 2):
        if {*pair} <= {*tried.selecting} or pair[0].split()[0] == pair[1].split()[0]:
            continue
        both = shown(row.name, *pair)
        for one, other in (pair, pair[::-1]):
            if both is not None and both == shown(row.name, other):
                ignored.add((one, other))
    assert ignored == {*tried.alike}


def test_json_has_all_views() -> None:
    """What takes the place of the table in text is added to it in JSON."""
    for view in ("--stacks", "--load", "--states"):
        assert shown("prstat", view, "--sort RSS") is None
        sorted_too = shown("prstat", view, "--sort RSS", "--json")
        assert sorted_too is not None
        assert sorted_too != shown("prstat", view, "--json")
        assert shown("prstat", view, "-L", "--json") is not None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_option_is_tried(row: Row) -> None:
    tried = tried_of(row)
    words = " ".join((*tried.selecting, *tried.others)).split()
    known = {word for word in words if word.startswith("-")} | {*tried.untried}
    assert known == row.options | {"-v", "--json"}


# --- selections that match nothing

NOWHERE = ("--cgroup /nowhere", f"--container {'1' * 12}", "--ns 5")
EMPTY = {
    "locks": (*NOWHERE, "--type mutex", "--state Z", "--min-age 1d", "-p 1"),
    "prstat": (
        *(*NOWHERE, "-u 12345", "--state Z", "--class NET", "--min-age 1d"),
        *("--max-age 0", "-p 1 --state Z", "-p 1 --kernel-threads"),
        *("-p 2 --user-tasks", "-P 0 -p 1", "--load --state Z", "--states --state Z"),
        *("--stacks --state Z", "--stacks --function f", "--stacks --module m"),
        *("--folded age --state Z", "--folded age --function f"),
    ),
    "zombies": (
        *(*NOWHERE, "-u 12345", "--parent 1", "--verdict traced", "--min-age 1d"),
        *("--tree -u 12345", "--by user --parent 1", "-v --parent 1"),
    ),
}


@pytest.mark.parametrize(
    ("name", "words"), [(name, words) for name in EMPTY for words in EMPTY[name]]
)
def test_selection_that_matches_nothing(name: str, words: str) -> None:
    """It says so in one line, and is no error."""
    (row,) = (row for row in ROWS if row.name == name)
    ran = call(row.command, *words.split(), CORE)
    assert (ran.status, ran.err) == (0, "")
    lines = [line for line in ran.out.splitlines() if "matches the selection" in line]
    assert len(lines) == 1
    assert re.match(r"(# )?No (task|blocked task|zombie|stack) matches", lines[0])


@pytest.mark.parametrize(
    ("name", "words"),
    [(name, "-u 12345") for name in ("prstat", "zombies")] + [("locks", "--state Z")],
)
def test_json_of_a_selection_that_matches_nothing(name: str, words: str) -> None:
    (row,) = (row for row in ROWS if row.name == name)
    ran = call(row.command, *words.split(), "--json", CORE)
    assert (ran.status, ran.err) == (0, "")
    rows = {"prstat": "tasks", "zombies": "zombies", "locks": "waits"}
    assert ran.json[rows[name]] == []


def test_sets_without_the_cpus() -> None:
    """A CPU and a set that both exist, but not together."""
    made = report([cpu(0), cpu(1)], sets=[cpuset("default", [0]), cpuset("/db", [1])])
    chosen = choose(made, CpusOptions(cpus=frozenset({0}), sets=("/db",)))
    assert "No CPU matches the selection." in printed(blocks(chosen, some=True))
