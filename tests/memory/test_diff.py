# SPDX-License-Identifier: LGPL-2.1-or-later

"""Differences between two snapshots, and files that are not snapshots."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from drgn import Program
from drgn.commands import CommandArgumentError, CommandError, run_command
from msatools.commands.memstat import COMMAND
from msgspec.structs import replace

from fixtures.demo import DEMOS
from msatools.cli.main import run_console
from msatools.memory.breakdowns import VIEWS
from msatools.memory.diff import GroupChange, MemstatDiff, compare, load_snapshot
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import PageGroup
from msatools.program import TargetSpec, open_target
from msatools.reports.diff import SnapshotError
from msatools.reports.forms import dumps

from .madereports import PAGE, SECOND, TARGET, group, report

Groups = tuple[PageGroup, ...]
BEFORE = report({"free.buddy": 900, "user.anon": 100})
AFTER = report({"free.buddy": 700, "user.anon": 300}, taken_at_ns=160 * SECOND)


def joined(before: Groups, after: Groups) -> tuple[GroupChange, ...]:
    """Compare the groups of a view."""
    found = compare(
        replace(BEFORE, by={"file": before}), replace(AFTER, by={"file": after})
    )
    assert found.by is not None
    return found.by["file"]


def codes(found: MemstatDiff) -> list[str]:
    return [note.code for note in found.notes]


# --- two reports


def test_classes_and_time() -> None:
    found = compare(BEFORE, AFTER, ("a.json", "b.json"))
    assert found.elapsed_ns == 60 * SECOND
    assert (found.before.file, found.after.file) == ("a.json", "b.json")
    assert [
        (c.name, c.before_pages, c.after_pages, c.delta_pages, c.delta_bytes)
        for c in (*found.classes, found.pages)
    ] == [
        ("free.buddy", 900, 700, -200, -200 * PAGE),
        ("user.anon", 100, 300, 200, 200 * PAGE),
        ("total", 1000, 1000, 0, 0),
    ]
    assert found.notes == ()
    assert found.by is None


def test_other_machine_is_noted() -> None:
    target = replace(TARGET, release="6.1.1", arch="aarch64")
    after = report({"free.buddy": 10}, target=target, taken_at_ns=SECOND)
    found = compare(BEFORE, after)
    assert codes(found) == [
        "other-release",
        "other-architecture",
        "other-memory",
        "earlier",
    ]
    assert found.notes[0].text == "different kernels: 6.12.1, then 6.1.1"
    assert found.elapsed_ns is None


def test_other_guest_is_noted() -> None:
    one, other = (replace(TARGET, kind="qmp", path=path) for path in ("/a", "/b"))
    found = compare(replace(BEFORE, target=one), replace(AFTER, target=other))
    assert codes(found) == ["other-guest"]
    # But two dumps of one machine are two files.
    other = replace(TARGET, path="vmcore.2")
    assert compare(BEFORE, replace(AFTER, target=other)).notes == ()


def test_pages_of_another_size_change_in_bytes() -> None:
    target = replace(TARGET, page_size=16 * PAGE)
    after = report({"free.buddy": 100}, page_size=16 * PAGE, target=target)
    found = compare(BEFORE, after)
    assert codes(found) == ["other-page-size"]
    (free, _) = found.classes
    assert (free.before_pages, free.after_pages) == (900, 100)
    assert (free.delta_pages, free.delta_bytes) == (None, 1600 * PAGE - 900 * PAGE)


def test_lost_pages_are_noted() -> None:
    lost = replace(AFTER, coverage={"excluded_pages": 2, "unreadable_pages": 3})
    found = compare(BEFORE, lost)
    assert [note.text for note in found.notes] == ["the second lacks 5 struct pages"]
    assert (found.before.lost_pages, found.after.lost_pages) == (0, 5)


def test_groups_are_joined_by_key() -> None:
    before = group("1", "init", user_anon=50), group("7", "cc", user_anon=9)
    after = (
        group("1", "systemd", user_anon=20, cache_file=40),
        group("8", "ld", user_anon=400),
    )
    made, init, gone = joined(before, after)
    assert (made.key, made.before_pages, made.delta_pages) == ("8", None, 400)
    assert (init.key, init.name, init.name_before) == ("1", "systemd", "init")
    assert init.delta_pages == 10
    changes = [(c.name, c.delta_pages) for c in init.classes]
    assert changes == [("cache.file", 40), ("user.anon", -30)]
    assert (gone.key, gone.after_pages, gone.delta_pages) == ("7", None, -9)
    assert gone.name_before is None


def test_groups_of_one_key_are_added() -> None:
    twice = group("-", user_anon=1), group("-", user_anon=2, cache_file=4)
    (only,) = joined(twice, (group("-", user_anon=3, cache_file=5),))
    assert (only.before_pages, only.after_pages) == (7, 8)
    assert [(c.name, c.delta_pages) for c in only.classes] == [("cache.file", 1)]


def test_views_that_one_report_lacks_are_left_out() -> None:
    found = compare(
        replace(BEFORE, by={"node": (group("0", user_anon=1),)}),
        replace(AFTER, by={"zone": (group("0", user_anon=1),)}),
    )
    assert found.by is None
    assert [note.text for note in found.notes] == [
        "only the first has pages by node",
        "only the second has pages by zone",
    ]


# --- files


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., str]:
    """A function that writes a file and returns its path."""

    def save(text: str | bytes, name: str = "a.json") -> str:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    return save


def test_report_of_the_demo_does_not_differ_from_itself() -> None:
    """A real report also has parts that are not compared."""
    opened = open_target(TargetSpec(path=str(DEMOS["6.12"].core), types="btf"))
    by = ("node", "zone", *VIEWS)
    real = collect_memstat(opened.prog, target=opened.target, by=by, verbose=True)
    text = io.BytesIO(dumps(real).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", SimpleNamespace(buffer=text))
        loaded = load_snapshot("-")
    assert loaded.classes == real.classes
    found = compare(real, loaded)
    assert found.notes == ()
    assert found.elapsed_ns == 0
    assert not any(change.delta_bytes for change in found.classes)
    assert found.by is not None
    assert {*found.by} == {*by}
    assert real.by is not None
    for name, groups in found.by.items():
        assert not any(group.delta_bytes or group.classes for group in groups)
        # Keys are unique.
        assert len(groups) == len(real.by[name]) > 0


FOREIGN = json.loads(dumps(AFTER)) | {"more": [1, 2]}
FOREIGN["classes"][0]["more"] = None


@pytest.mark.parametrize(
    "text",
    [
        f"{dumps(BEFORE)}\n{dumps(AFTER)}\n\n",  # the last line counts
        json.dumps(json.loads(dumps(AFTER)), indent=2),  # as formatted by ``jq .``
        json.dumps(FOREIGN),  # keys of a newer msatools are ignored
    ],
)
def test_report_in_other_shapes(saved: Callable[..., str], text: str) -> None:
    assert load_snapshot(saved(text)) == AFTER


def refused(path: str) -> str:
    """Return the error message for a file that is not a snapshot, without its name."""
    with pytest.raises(SnapshotError) as caught:
        load_snapshot(path)
    name, _, message = str(caught.value).partition(": ")
    assert name == path
    return message


WHOLE = dumps(BEFORE)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty; make it with "),
        (" \n\n", "empty; "),
        ("hello\n", "not JSON; make it with msa-memstat --json"),
        (b"KDUMP   \x00\xff", "not JSON; "),
        ("[" * 100_000, "not JSON; "),
        ('{"schema": 5}', "no report of msa-memstat (without a schema); "),
        ('{"schema": "msatools.prstat/1"}', "no report of msa-memstat (msatools.prs"),
        ('{"schema": "msatools.memstat-diff/1"}', "no report of msa-memstat ("),
        ('{"schema": "msatools.memstat/2"}', "msatools.memstat/2, where msatools.mem"),
        (
            '{"schema": "msatools.memstat/1"}',
            "damaged: object missing required field `target`; ",
        ),
        (WHOLE[:-1], "cut off, or damaged: its last report has no end; take it again"),
        (WHOLE[:300], "cut off, or damaged"),
        (f"{WHOLE}\n{WHOLE[:300]}", "cut off, or damaged"),
        (WHOLE.replace('"pages": 1000', '"pages": NaN', 1), "cut off, or damaged"),
    ],
)
def test_not_a_snapshot(saved: Callable[..., str], text: str | bytes, why: str) -> None:
    assert refused(saved(text)).startswith(why)


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        (("classes", 1, "pages"), -1, "a count of pages is negative"),
        (("target", "page_size"), 0, "target.page_size: 0 is no power of two"),
        (("coverage", "excluded_pages"), -1, "coverage: a count is negative"),
        (("by",), {"node": 3}, "by[...]: expected `array`, got `int`"),
    ],
)
def test_damaged_report(
    saved: Callable[..., str], path: tuple[Any, ...], value: object, why: str
) -> None:
    found: Any = json.loads(WHOLE)
    *parents, last = path
    part = found
    for key in parents:
        part = part[key]
    part[last] = value
    assert refused(saved(json.dumps(found))) == f"damaged: {why}; take it again"


# --- the command


@pytest.fixture
def files(saved: Callable[..., str]) -> tuple[str, str]:
    """The two reports, saved."""
    return saved(f"{dumps(BEFORE)}\n"), saved(f"{dumps(AFTER)}\n", "b.json")


Capture = pytest.CaptureFixture[str]


def test_text_and_json(files: tuple[str, str], capsys: Capture) -> None:
    assert run_console(COMMAND, ["--diff", *files]) == 0
    out, err = capsys.readouterr()
    assert "60.0s from one to the other\n" in out
    assert "  anon      100    300    +200  +800 KiB\n" in out
    assert run_console(COMMAND, ["--json", "--diff", *files]) == 0
    document, more = capsys.readouterr()
    assert json.loads(document) == json.loads(dumps(compare(BEFORE, AFTER, files)))
    assert (err, more) == ("", "")


def test_in_drgn(files: tuple[str, str], capsys: Capture) -> None:
    prog: Program = open_target(TargetSpec(path=str(DEMOS["6.12"].core))).prog
    found = run_command(prog, f"memstat --diff {' '.join(files)}")
    assert found == compare(BEFORE, AFTER, files)
    assert "from one to the other" in capsys.readouterr().out
    with pytest.raises(CommandError, match=r"^%memstat: /nowhere: no such file"):
        run_command(prog, f"memstat --diff /nowhere {files[0]}")
    message = r"^%memstat: 5: --diff reads no target"
    with pytest.raises(CommandArgumentError, match=message):
        run_command(prog, f"memstat --diff {' '.join(files)} 5")
