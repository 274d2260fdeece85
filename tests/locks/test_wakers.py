# SPDX-License-Identifier: LGPL-2.1-or-later

"""Wakers of herds get user stack frames (live: tests/live/test_herddumps.py)."""

from msgspec.structs import replace

from msatools.locks.report import Herd, Waker
from msatools.locks.user_stacks import with_frames
from tests.locks.seen import Seen

NOBODY = 1 << 22
HERD = Herd(
    lock="futex 1:0x10",
    waiters=20,
    owner=None,
    kind="futex",
    address=None,
    pids=(1,),
    min_age_ns=0,
    max_age_ns=0,
    nvcsw_median=9,
    confidence="one dump",
)


def with_waker(dump: Seen, pid: int, herd: Herd = HERD) -> Herd:
    herd = replace(herd, waker=Waker(pid=pid, tgid=1, comm="waker"))
    (found,) = with_frames([herd], dump.context())
    return found


def test_waker_has_frames(tasks: Seen) -> None:
    waker = with_waker(tasks, 1).waker
    assert waker is not None
    assert waker.frames
    assert not waker.frames[0].guess


def test_waker_that_was_not_read_has_no_frames(tasks: Seen) -> None:
    """It has exited, or is not among the selected tasks."""
    assert with_waker(tasks, NOBODY).waker == Waker(pid=NOBODY, tgid=1, comm="waker")


def test_waker_of_an_unconfirmed_herd_has_no_frames(tasks: Seen) -> None:
    alone = replace(HERD, confidence="none")
    assert with_waker(tasks, 1, alone).waker == Waker(pid=1, tgid=1, comm="waker")
