# SPDX-License-Identifier: LGPL-2.1-or-later

"""What options take."""

import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

import pytest

from msatools.cli.options import (
    cgroup_list,
    column_list,
    container_list,
    cpu_list,
    duration_ns,
    known_names,
    name_list,
    number_list,
    positive_number,
    row_count,
    state_letters,
    user_list,
)


def one_of_two(word: str) -> tuple[str, ...]:
    return column_list(word, ("a", "B"))


@pytest.mark.parametrize(
    ("parse", "word", "value"),
    [
        (number_list, "1", (1,)),
        (number_list, "30,1,2,1", (30, 1, 2)),
        (number_list, "0", (0,)),
        (name_list, "a,b", ["a", "b"]),
        (name_list, ",a,,", ["a"]),
        (positive_number, "17", 17),
        (row_count, "17", 17),
        (row_count, "ALL", sys.maxsize),
        (user_list, "0,root,0,a-b.c$", (0, "root", "a-b.c$")),
        (cgroup_list, "/,/a/b*", ("/", "/a/b*")),
        (container_list, "0123456789AB", ("0123456789ab",)),
        (one_of_two, "b,A,b", ("B", "a")),
        (one_of_two, "all", ("a", "B")),
        (cpu_list, "0", {0}),
        (cpu_list, "0-3,8", {0, 1, 2, 3, 8}),
        (cpu_list, "5-5,4-6", {4, 5, 6}),
        (cpu_list, "65535", {65535}),
        (duration_ns, "30", 30 * 10**9),
        (duration_ns, "1.5", 1_500_000_000),
        (duration_ns, ".5s", 500_000_000),
        (duration_ns, "20ms", 20_000_000),
        (duration_ns, "7 us", 7_000),
        (duration_ns, "5m", 300 * 10**9),
        (duration_ns, "2d", 172_800 * 10**9),
        (duration_ns, "9" * 400, 1 << 62),
        (state_letters, "D", {"D"}),
        (state_letters, "t,T", {"t", "T"}),
    ],
)
def test_values(parse: Callable[[str], Any], word: str, value: object) -> None:
    assert parse(word) == value


def test_known_names() -> None:
    known = ("pid", "comm", "uid")
    assert known_names(iter(("uid", "pid")), known, "column") == ["uid", "pid"]
    with pytest.raises(ArgumentTypeError) as caught:
        known_names(("pid", "gid", "x"), known, "column")
    assert str(caught.value) == "unknown column 'gid'; choose from pid, comm, uid"


@pytest.mark.parametrize(
    ("parse", "words"),
    [
        (number_list, ("", "x", "1,", ",1", "-1", "1-2", "1.5", "+1", " 1", "²", "٣")),
        (positive_number, ("0", "00", "-1", "", "1,2", "1e3")),
        (duration_ns, ("", "x", "-1", "1x", "1e3", "nan", "inf", "<5m", "1s\n", "٣")),
        (cpu_list, ("", "3-1", "1-", "-1", "0-65536", "65536", "a", "1-2-3", "0,,1")),
    ],
)
def test_no_values(parse: Callable[[str], Any], words: tuple[str, ...]) -> None:
    for word in words:
        with pytest.raises(ArgumentTypeError, match=r"^not a ") as caught:
            parse(word)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", ["", ",", "Q", "DQ", "d"])
def test_no_states(word: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^states are some of R, S, D"):
        state_letters(word)


def test_no_list_of_cpus_is_long() -> None:
    """Nobody waits while a wrong one is written out."""
    with pytest.raises(ArgumentTypeError, match="not a list of CPUs"):
        cpu_list("0-99999999999999")
