# SPDX-License-Identifier: LGPL-2.1-or-later

"""What ``msa-memstat --diff`` shows."""

import io
from dataclasses import replace

from msatools.kernel.report import Note
from msatools.memory.diff import MemstatDiff, compare
from msatools.render import show
from msatools.render.memstatdiff import blocks
from tests.memory.madereports import PAGE, SECOND, TARGET, check, group, report

BEFORE = report(
    {"free.buddy": 900, "user.anon": 100, "kernel.zsmalloc": 0, "reserved": 5}
)
AFTER = report(
    {"free.buddy": 700, "user.anon": 300, "kernel.zsmalloc": 0, "reserved": 5},
    taken_at_ns=160 * SECOND,
)


def shown(diff: MemstatDiff, rows: int | None = 20) -> list[str]:
    out = io.StringIO()
    show(blocks(diff, rows), out)
    return out.getvalue().splitlines()


def test_all_of_it() -> None:
    assert shown(compare(BEFORE, AFTER, ("a.json", "b.json"))) == [
        "SNAPSHOT  KERNEL  OF                      UP  PAGES",
        "a.json    6.12.1  vmcore (ELF) vmcore  1m40s  1,005",
        "b.json    6.12.1  vmcore (ELF) vmcore  2m40s  1,005",
        "60.0s from one to the other",
        "CLASS     BEFORE  AFTER  CHANGE      SIZE",
        "Free         900    700    -200  -800 KiB",
        "  buddy      900    700    -200  -800 KiB",
        "User         100    300    +200  +800 KiB",
        "  anon       100    300    +200  +800 KiB",
        "Cache          -      -       0",
        "Kernel         0      0       0",
        "Managed    1,000  1,000       0",
        "Reserved       5      5       0",
        "Total      1,005  1,005       0",
        "0 checks: 0 exact",
    ]


def test_checks_that_differ_in_one() -> None:
    same, none = check("free.buddy", 5, 5), check("swapcache", 0, 0)
    explained = check("cache", 10, 9, "why it is so")
    lost = replace(check("cache", 10, 9), kernel_pages=None, difference=None)
    pairs = compare(
        replace(BEFORE, checks=(same, explained, check("hwpoison", 3, 0))),
        replace(AFTER, checks=(same, lost, none)),
    )
    assert shown(pairs)[-4:] == [
        "4 checks: 2 exact",
        "CHECK     BEFORE            AFTER",
        "cache     +1  why it is so  - (lost)",
        "hwpoison  +3  UNEXPLAINED   -",
    ]


def test_groups() -> None:
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
    table = [
        "",
        "Changes by process",
        "NAME           BEFORE  AFTER  CHANGE     SIZE  MOST OF IT",
        "five (new)          -     20     +20  +80 KiB  kernel.slab +20",
        "uno (was one)     100    110     +10  +40 KiB  cache.file +60, user.anon -50",
        "two (gone)         10      -     -10  -40 KiB  user.anon -10",
        "four                4      3      -1   -4 KiB  user.anon -1",
        "1 that did not",
    ]
    assert shown(diff)[-8:] == table
    assert shown(diff, None)[-8:] == table
    cut = [*table[:5], "2 more that changed, 1 that did not"]
    assert shown(diff, 2)[-6:] == cut


def test_groups_of_which_none_changed() -> None:
    groups = {"node": (group("0", user_anon=1), group("1", user_anon=2))}
    diff = compare(replace(BEFORE, by=groups), replace(AFTER, by=groups))
    assert shown(diff)[-2:] == ["Changes by node", "2 that did not"]


def test_bytes_where_pages_are_not_the_same() -> None:
    target = replace(TARGET, page_size=16 * PAGE)
    groups = {"node": (group("0", free_buddy=100),)}
    after = report({"free.buddy": 100}, 16 * PAGE, target=target, by=groups)
    lines = shown(compare(replace(BEFORE, by=groups), after))
    assert "  buddy   3.5 MiB  6.2 MiB  +2.7 MiB" in lines
    assert "Cache           -        -         0" in lines
    assert "0     400 KiB  6.2 MiB  +5.9 MiB  free.buddy +5.9 MiB" in lines


def test_class_that_is_not_known_here() -> None:
    lines = shown(compare(BEFORE, report({"kernel.new": 7})))
    assert "kernel.new       -      7      +7   +28 KiB" in lines


def test_what_a_file_says_is_escaped() -> None:
    target = replace(TARGET, release="6\x1b[1m", path="a\nb")
    noted = replace(BEFORE, target=target, notes=(Note("x", "a\rb"),))
    text = "\n".join(shown(compare(noted, AFTER, ("\x07", "b"))))
    assert not any(letter in text for letter in "\x1b\r\x07")
    assert "note of the first: a\\x0db" in text
    assert "6\\x1b[1m" in text
    assert "vmcore (ELF) a\\x0ab" in text
