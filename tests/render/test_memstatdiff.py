# SPDX-License-Identifier: LGPL-2.1-or-later

"""The view of ``msa-memstat --diff``."""

import pytest
from msgspec.structs import replace

from msatools.kernel.report import Note
from msatools.memory.diff import MemstatDiff, compare
from msatools.render.memstat.diff import memstat_diff_blocks as blocks
from tests.memory.madereports import PAGE, SECOND, TARGET, check, group, report
from tests.render.screens import EVIL, check_escaped, printed
from tests.support.golden import Golden

BEFORE = report(
    {"free.buddy": 900, "user.anon": 100, "kernel.zsmalloc": 0, "reserved": 5}
)
AFTER = report(
    {"free.buddy": 700, "user.anon": 300, "kernel.zsmalloc": 0, "reserved": 5},
    taken_at_ns=160 * SECOND,
)


def shown(diff: MemstatDiff, rows: int | None = 20) -> list[str]:
    return printed(blocks(diff, rows))


def test_golden_all_of_it(golden: Golden) -> None:
    golden("memstatdiff", shown(compare(BEFORE, AFTER, ("a.json", "b.json"))))


def test_golden_checks_that_fail_in_one_snapshot(golden: Golden) -> None:
    same, none = check("free.buddy", 5, 5), check("swapcache", 0, 0)
    explained = check("cache", 10, 9, "why it is so")
    lost = replace(check("cache", 10, 9), kernel_pages=None, difference=None)
    pairs = compare(
        replace(BEFORE, checks=(same, explained, check("hwpoison", 3, 0))),
        replace(AFTER, checks=(same, lost, none)),
    )
    golden("memstatdiff-checks", shown(pairs)[-4:])


@pytest.mark.parametrize("rows", [20, None, 2])
def test_golden_groups(golden: Golden, rows: int | None) -> None:
    before = (
        group("1", "one", user_anon=100),
        group("2", "two", user_anon=10),
        group("3", "three", user_anon=3),
        group("4", "four", user_anon=4),
    )
    after = (
        group("1", "uno", user_anon=50, cache_file=60),
        group("3", "three", user_anon=3),
        group("4", "four", user_anon=3),
        group("5", "five", kernel_slab=20),
    )
    diff = compare(
        replace(BEFORE, by={"process": before}), replace(AFTER, by={"process": after})
    )
    lines = shown(diff, rows)
    # 20 rows have room for all groups, so that both are one golden file.
    golden(f"memstatdiff-groups{'-2' * (rows == 2)}", lines[lines.index("") :])


def test_unchanged_groups_are_only_counted() -> None:
    groups = {"node": (group("0", user_anon=1), group("1", user_anon=2))}
    diff = compare(replace(BEFORE, by=groups), replace(AFTER, by=groups))
    assert shown(diff)[-2:] == ["Changes by node", "2 that did not"]


def test_golden_bytes_if_page_sizes_differ(golden: Golden) -> None:
    """One of the classes is unknown to this version."""
    target = replace(TARGET, page_size=16 * PAGE)
    groups = {"node": (group("0", free_buddy=100),)}
    pages = {"free.buddy": 100, "kernel.new": 7}
    after = report(pages, 16 * PAGE, target=target, by=groups)
    lines = shown(compare(replace(BEFORE, by=groups), after))
    golden("memstatdiff-bytes", lines)


def test_text_of_a_snapshot_is_escaped() -> None:
    target = replace(TARGET, release=EVIL, path=EVIL)
    noted = replace(BEFORE, target=target, notes=(Note("x", EVIL),))
    check_escaped(blocks(compare(noted, AFTER, (EVIL, "b")), 20), 3)
