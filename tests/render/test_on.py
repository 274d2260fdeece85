# SPDX-License-Identifier: LGPL-2.1-or-later

"""The text of the ON column: what a task waits for."""

import pytest

from msatools.locks.report import WaitTarget
from msatools.program.model import Address
from msatools.render.on import on_text

SECOND = 10**9
FILE = "/data/program"

TEXTS = {
    "futex 0x4c80f0 (50 waiters)": WaitTarget(
        kind="futex", address=Address(0x4C80F0), waiters=50, shared=False
    ),
    "futex 0x4c80f4": WaitTarget(kind="futex", address=Address(0x4C80F4), waiters=1),
    "futex 0x10 owner 7": WaitTarget(
        kind="futex", address=Address(16), owner=7, waiters=1
    ),
    "futex inode 5": WaitTarget(kind="futex", inode=5, shared=True),
    "3 futexes": WaitTarget(kind="futex", addresses=(Address(4),) * 3, count=3),
    "mutex s_vfs_rename_mutex /mnt owner 9 (1,200 waiters)": WaitTarget(
        kind="lock",
        type="mutex",
        name="s_vfs_rename_mutex",
        path="/mnt",
        owner=9,
        waiters=1200,
        address=Address(1 << 63),
    ),
    "mutex pipe:[12] owner 9": WaitTarget(
        kind="lock", type="mutex", name="pipe", inode=12, owner=9
    ),
    "rwsem mmap_lock of 12": WaitTarget(
        kind="lock", type="rwsem", name="mmap_lock", pid=12
    ),
    "semaphore 0xff00": WaitTarget(
        kind="lock", type="semaphore", address=Address(0xFF00)
    ),
    "rwsem": WaitTarget(kind="lock", type="rwsem"),
    "/data/program vda": WaitTarget(
        kind="page", path=FILE, device="vda 254:0", inode=3
    ),
    "/data/program 254:0": WaitTarget(kind="disk", path=FILE, device="254:0"),
    "0x7f0000 dm-2": WaitTarget(
        kind="page", address=Address(0x7F0000), device="dm-2 254:2"
    ),
    "inode 3 vda": WaitTarget(kind="disk", inode=3, device="vda 254:0"),
    "/data/program nfs4 0:45": WaitTarget(
        kind="page", path=FILE, inode=3, fs="nfs4 0:45"
    ),
    "inode 3 tmpfs": WaitTarget(kind="page", inode=3, fs="tmpfs"),
    "page": WaitTarget(kind="page"),
    "journal vda by 40": WaitTarget(
        kind="journal", pid=40, device="vda 254:0", waiters=1
    ),
    "socket:[1234] tcp 127.0.0.1:7001": WaitTarget(
        kind="socket", inode=1234, type="tcp", local="127.0.0.1:7001"
    ),
    "socket:[1] tcp6 [::1]:1 -> [::1]:2": WaitTarget(
        kind="socket", inode=1, type="tcp6", local="[::1]:1", peer="[::1]:2"
    ),
    "socket:[2]": WaitTarget(kind="socket", inode=2),
    "pipe:[123]": WaitTarget(kind="pipe", inode=123, fd=3),
    "/run/fifo": WaitTarget(kind="pipe", inode=123, path="/run/fifo"),
    "eventfd fd 4": WaitTarget(kind="eventfd", fd=4),
    "timerfd fd 4 until +3.2s": WaitTarget(kind="timerfd", fd=4, left_ns=3_200_000_000),
    "12 fds": WaitTarget(kind="poll", count=12),
    "12 fds until +1.0s": WaitTarget(kind="poll", count=12, left_ns=SECOND),
    "fd 5": WaitTarget(kind="poll", count=1, fds=(5,)),
    "1 fd": WaitTarget(kind="poll", count=1),
    "until +1.0s": WaitTarget(kind="poll", count=0, fds=(), left_ns=SECOND),
    "no fds": WaitTarget(kind="poll", count=0, fds=()),
    "poll": WaitTarget(kind="poll"),
    "epoll fd 6": WaitTarget(kind="epoll", fd=6),
    "pid 12": WaitTarget(kind="child", pid=12),
    "children of group 12": WaitTarget(kind="child", pgid=12),
    "any child": WaitTarget(kind="child"),
    "until +3.2s": WaitTarget(
        kind="timer", expires_ns=5 * SECOND, left_ns=3_200_000_000
    ),
    "until -17ms": WaitTarget(kind="timer", left_ns=-17_000_000),
    "a timer": WaitTarget(kind="timer", expires_ns=SECOND),
    "SIGUSR1": WaitTarget(kind="signals", signals=(10,)),
    "62 signals": WaitTarget(kind="signals", signals=tuple(range(1, 63))),
    "any signal": WaitTarget(kind="signals"),
    "by SIGSTOP": WaitTarget(kind="stop", signals=(19,)),
    "stopped": WaitTarget(kind="stop"),
    "tracer 12": WaitTarget(kind="tracer", pid=12),
    "flock /run/lock owner 3": WaitTarget(
        kind="flock", path="/run/lock", owner=3, inode=2
    ),
    "posix_lock inode 2": WaitTarget(kind="posix_lock", inode=2),
    "msgqueue 0": WaitTarget(kind="msgqueue", id=0),
    "semaphore 3 until +1.0s": WaitTarget(kind="semaphore", id=3, left_ns=SECOND),
    "mqueue /receive": WaitTarget(kind="mqueue", fd=1, path="/receive"),
    "/dev/pts/0": WaitTarget(kind="tty", path="/dev/pts/0", fd=0),
    "tty fd 0": WaitTarget(kind="tty", fd=0),
    "io_uring fd 9": WaitTarget(kind="io_uring", fd=9),
    "aio 0x1000": WaitTarget(kind="aio", address=Address(0x1000)),
    "userfaultfd fd 9 0x1000": WaitTarget(
        kind="userfaultfd", fd=9, address=Address(0x1000)
    ),
    "cgroup /high": WaitTarget(kind="cgroup", path="/high"),
    "cpu3": WaitTarget(kind="cpu", cpu=3),
    # A kind without words of its own.
    "fanotify fd 3": WaitTarget(kind="fanotify", fd=3),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text(text: str) -> None:
    assert on_text(TEXTS[text]) == text
