# SPDX-License-Identifier: LGPL-2.1-or-later

"""Users by name, and what tasks are in, as the command line has them."""

import argparse
import os
import pwd

import pytest
from msatools.commands.prstat import COMMAND
from msgspec.structs import replace

from msatools.cli.arguments import make_parser, membership, uids
from msatools.cli.options import UsageError, parse_words, target_spec
from msatools.tasks.identity import Membership
from tests.locks.madelocks import TARGET

OWN = replace(TARGET, kind="kcore", live=True)
NAME = pwd.getpwuid(os.getuid()).pw_name
ID = "0123456789abcdef" * 4


def parsed(*words: str) -> argparse.Namespace:
    return make_parser(COMMAND, in_drgn=False).parse_intermixed_args(words)


def test_users_of_this_machine_have_names() -> None:
    args = parsed("-u", f"7,{NAME}")
    assert uids(args, OWN) == (7, os.getuid())
    assert uids(parsed(), OWN) is None
    for words in ((), ("-k",), ("-c", "/proc/kcore"), ("/proc/kcore",)):
        args = parsed("-u", NAME, *words)
        assert target_spec(args, parse_words(args.words)).is_live


def test_users_that_there_are_not() -> None:
    with pytest.raises(UsageError, match="-u no-such-user: this machine has no user"):
        uids(parsed("-u", "no-such-user"), OWN)


@pytest.mark.parametrize("kind", ["elf", "kdump", "qmp"])
def test_users_of_other_kernels_have_numbers_alone(kind: str) -> None:
    other = replace(TARGET, kind=kind)
    assert uids(parsed("-u", "7,8"), other) == (7, 8)
    with pytest.raises(UsageError, match=f"-u {NAME}: a dump has no user names"):
        uids(parsed("-u", f"7,{NAME}"), other)


def test_memberships() -> None:
    assert membership(parsed()).is_any
    words = ("--cgroup", "/a,/b", "--cgroup", "/c", "--ns", "1,2", "--ns", "3")
    found = membership(parsed(*words, "--container", f"{ID[:12].upper()},{ID}"))
    assert found == Membership(
        cgroups=("/a", "/b", "/c"), containers=(ID[:12], ID), namespaces=(1, 2, 3)
    )
