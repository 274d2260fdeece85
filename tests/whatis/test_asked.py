# SPDX-License-Identifier: LGPL-2.1-or-later

"""Addresses as they are written, and how they are told from a target."""

import re

import pytest
from msatools.commands.whatis import COMMAND

from msatools.cli.arguments import make_parser
from msatools.cli.main import run_console
from msatools.cli.options import UsageError
from msatools.whatis.model import looks_like_address, parse
from tests.support.calls import CORE, call

WRITTEN = {
    "ffff888003b4e0c0": ("kernel", 0xFFFF888003B4E0C0, None, None),
    "0xffff888003b4e0c0": ("kernel", 0xFFFF888003B4E0C0, None, None),
    "FFFF888003B4E0C0:": ("kernel", 0xFFFF888003B4E0C0, None, None),
    "[<ffffffff81000000>]": ("kernel", 0xFFFFFFFF81000000, None, None),
    "(ffffffff81000000),": ("kernel", 0xFFFFFFFF81000000, None, None),
    "5": ("kernel", 5, None, None),
    "phys:3b4e0c0": ("physical", 0x3B4E0C0, None, None),
    "phys:0x10": ("physical", 16, None, None),
    "pfn:10": ("pfn", 10, None, None),
    "pfn:0x10": ("pfn", 16, None, None),
    "4711:7f01": ("user", 0x7F01, 4711, None),
    "1:0x400000": ("user", 0x400000, 1, None),
    "jiffies+0": ("symbol", 0, None, "jiffies"),
    "schedule+0x4c/0xf0": ("symbol", 0x4C, None, "schedule"),
    "do_nanosleep.cold+8": ("symbol", 8, None, "do_nanosleep.cold"),
}


@pytest.mark.parametrize("word", WRITTEN)
def test_addresses(word: str) -> None:
    found = parse(word)
    assert found is not None
    assert (found.space, found.number, found.pid, found.symbol) == WRITTEN[word]
    assert found.word == word
    assert looks_like_address(word)


NO_ADDRESSES = (
    *("vmcore", "./5", "/var/crash/deadbeef", "vmcore.1", "pfn:x", "phys:", "-5"),
    *("0.5", "1e5.gz", "ffff888003b4e0c0ff", "x:ffff", "jiffies+x", "", "12345678:1"),
)


@pytest.mark.parametrize("word", NO_ADDRESSES)
def test_words_that_are_no_addresses(word: str) -> None:
    assert not looks_like_address(word)


def test_a_symbol_alone_is_one_only_after_the_target() -> None:
    assert not looks_like_address("jiffies")
    found = parse("jiffies")
    assert found is not None
    assert (found.symbol, found.number) == ("jiffies", 0)


SPLIT = {
    "vmcore ffff8880": (["vmcore"], ["ffff8880"]),
    "ffff8880 vmcore": (["vmcore"], ["ffff8880"]),
    "vmcore jiffies": (["vmcore"], ["jiffies"]),
    "./deadbeef deadbeef": (["./deadbeef"], ["deadbeef"]),
    "deadbeef": ([], ["deadbeef"]),
    "-c deadbeef jiffies 5": ([], ["jiffies", "5"]),
    "-k jiffies": ([], ["jiffies"]),
    "--qemu sock jiffies": ([], ["jiffies"]),
    "-k /dump jiffies": (["/dump"], ["jiffies"]),
}


@pytest.mark.parametrize("line", SPLIT)
def test_target_and_addresses(line: str) -> None:
    parser = make_parser(COMMAND, in_drgn=False)
    args = parser.parse_intermixed_args(line.split())
    assert (args.words, args.operands) == SPLIT[line]


def test_inside_drgn_all_words_are_addresses() -> None:
    parser = make_parser(COMMAND, in_drgn=True)
    args = parser.parse_intermixed_args(["vmcore", "5"])
    assert (args.words, args.operands) == ([], ["vmcore", "5"])
    with pytest.raises(UsageError, match="not ADDRESS, and there are no samples"):
        parser.parse_intermixed_args(["-5"])


def test_no_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_console(COMMAND, [CORE]) == 2
    assert "no ADDRESS is named" in capsys.readouterr().err


def test_nothing_known_is_an_answer() -> None:
    ran = call(COMMAND, CORE, "no_such_symbol", "deadbeef", "0", "--json", "--strict")
    assert ran.status == 0
    answers = ran.json["answers"]
    assert [answer["kind"] for answer in answers] == ["unknown"] * 3
    assert [answer["address"] for answer in answers] == [None, "0xdeadbeef", "0x0"]
    assert answers[0]["text"] == "no symbol of that name"
    assert answers[2]["text"] == "NULL"


def test_an_address_beyond_the_kernels_memory() -> None:
    ran = call(COMMAND, CORE, "ffffffffffffffff", "8000000000000000", "--json")
    assert ran.status == 0
    first, second = ran.json["answers"]
    assert (first["kind"], first["readable"]) == ("unmapped", False)
    assert second["kind"] == "unknown"
    assert re.search("not an address", second["text"])


@pytest.mark.parametrize(
    ("word", "is_pid"),
    [("180", True), ("4711", True), ("0x180", False), ("b4", False), ("0", False)],
)
def test_what_may_be_a_pid(word: str, is_pid: bool) -> None:
    """It is an address, and the answer says how to ask about a task."""
    (answer,) = call(COMMAND, CORE, word, "--json").json["answers"]
    assert answer["text"].endswith(f"; for a PID: msa-prstat -p {word}") == is_pid
