# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the guest's half makes of files of /proc: namespaces, heirs, limits."""

from signal import SIGCHLD

import pytest

from fixtures.lab.guest.zombies import Seen, heir_of, masks


def files_of(pid: int, parent: int, ns_pids: str, inode: int) -> dict[str, str]:
    """What Seen needs to know of a process that has a thread."""
    status = f"Uid:\t1\t2\t2\t2\nNSpid:\t{ns_pids}\nNSpgid:\t{ns_pids}\nNSsid:\t0\n"
    status += "SigBlk:\t0000000000010000\nSigIgn:\t0000000000000001\n"
    status += "SigCgt:\t8000000000000000\nSigPnd:\t0\nShdPnd:\t0\n"
    place, line = f"/proc/{pid}", f"{pid} (a) b) S {parent} 0 0"
    return {
        f"{place}/stat": line,
        f"{place}/status": status,
        f"{place}/limits": f"Max processes     {pid}    unlimited  processes",
        f"{place}/ns/pid": f"pid:[{inode}]",
        f"{place}/task/{pid}/stat": line,
        f"{place}/task/{pid}/status": status,
    }


@pytest.fixture
def seen() -> Seen:
    """A process in a namespace in the namespace of all, and its parents."""
    return Seen(
        files_of(1, 0, "1", 100)
        | files_of(5, 1, "5", 100)
        | files_of(6, 5, "6\t1", 200)
        | files_of(7, 6, "7\t2", 200)
    )


def test_numbers_count_in_every_namespace_above(seen: Seen) -> None:
    assert seen.ids() == {100: 4, 200: 2}
    assert seen.namespaces[200] == {"init": 6, "level": 1, "parent": 100}


def test_heirs(seen: Seen) -> None:
    assert heir_of(seen, 5, set()) == 1
    assert heir_of(seen, 7, {5}) == 6  # a subreaper above has no say in there
    assert heir_of(seen, 6, {5}) is None


def test_masks_are_lists_of_signals(seen: Seen) -> None:
    found = masks(seen, 5, 5)
    assert (found["blocked"], found["ignored"]) == ([SIGCHLD], [1])
    assert (found["caught"], found["shared"]) == ([64], [])


def test_lowest_limit_of_a_user(seen: Seen) -> None:
    assert seen.users() == {1: {"processes": 4, "threads": 4, "max_processes": 1}}
