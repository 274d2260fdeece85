# SPDX-License-Identifier: LGPL-2.1-or-later

"""The current system call of each task, by the saved registers of user mode.

Also the children that threads in wait() wait for.
"""

from collections.abc import Iterator
from typing import Literal

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import UNREADABLE, DamagedDataError
from msatools.kernel.reader import U32, U64, Addresses, Reader, column
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import Booleans, Numbers, lose_many
from msatools.kernel.walks import list_records
from msatools.selfdesc.find import find_constant, find_type, offset_of
from msatools.tasks.table import PF_KTHREAD, TaskTable
from msatools.tasks.unwind import StackMemory

# --- The current system call of each task, by the saved registers of user mode.
#
# The registers lie at the top of the task's stack (task_pt_regs(); asm/ptrace.h of x86
# and arm64). /proc/PID/syscall shows the same.


NO_CALL = -1
"""Number of a system call if the task entered the kernel by an exception."""


_USER_CS, _USER_CS32 = 0x33, 0x23
_X86_ARGUMENTS = ("di", "si", "dx", "r10", "r8", "r9")
_X86_ARGUMENTS32 = ("bx", "cx", "dx", "si", "di", "bp")
# Bytes above the registers: 16 with CONFIG_X86_FRED since "x86/fred: Reserve space for
# the FRED stack frame" (in v6.9).
_X86_PADDINGS = (0, 16)

# arch/x86/entry/syscalls/syscall_64.tbl: calls that can wait, and that may be missing
# on the stack because the compiler inlined them.
_X86_NAMES = {
    **dict(enumerate(("read", "write", "open", "close"))),
    7: "poll",
    16: "ioctl",
    **dict(enumerate(("pread64", "pwrite64", "readv", "writev"), 17)),
    23: "select",
    34: "pause",
    35: "nanosleep",
    40: "sendfile",
    **dict(enumerate(("connect", "accept", "sendto", "recvfrom", "sendmsg"), 42)),
    **dict(enumerate(("recvmsg", "shutdown"), 47)),
    **dict(enumerate(("clone", "fork", "vfork", "execve"), 56)),
    61: "wait4",
    65: "semop",
    **dict(enumerate(("msgsnd", "msgrcv"), 69)),
    **dict(enumerate(("fcntl", "flock", "fsync", "fdatasync"), 72)),
    **dict(enumerate(("truncate", "ftruncate", "getdents"), 76)),
    128: "rt_sigtimedwait",
    130: "rt_sigsuspend",
    187: "readahead",
    202: "futex",
    208: "io_getevents",
    217: "getdents64",
    220: "semtimedop",
    230: "clock_nanosleep",
    232: "epoll_wait",
    **dict(enumerate(("mq_timedsend", "mq_timedreceive"), 242)),
    247: "waitid",
    **dict(enumerate(("openat", "mkdirat"), 257)),
    **dict(enumerate(("pselect6", "ppoll"), 270)),
    **dict(enumerate(("splice", "tee", "sync_file_range"), 275)),
    281: "epoll_pwait",
    285: "fallocate",
    288: "accept4",
    **dict(enumerate(("preadv", "pwritev"), 295)),
    299: "recvmmsg",
    307: "sendmmsg",
    326: "copy_file_range",
    **dict(enumerate(("preadv2", "pwritev2"), 327)),
    333: "io_pgetevents",
    426: "io_uring_enter",
    435: "clone3",
    441: "epoll_pwait2",
    449: "futex_waitv",
    **dict(enumerate(("futex_wait", "futex_requeue"), 455)),
}


# include/uapi/asm-generic/unistd.h: the same calls, as far as arm64 has them.
_ARM64_NAMES = {
    4: "io_getevents",
    22: "epoll_pwait",
    25: "fcntl",
    29: "ioctl",
    32: "flock",
    34: "mkdirat",
    **dict(enumerate(("truncate", "ftruncate", "fallocate"), 45)),
    **dict(enumerate(("openat", "close"), 56)),
    61: "getdents64",
    **dict(enumerate(("read", "write", "readv", "writev"), 63)),
    **dict(enumerate(("pread64", "pwrite64", "preadv", "pwritev", "sendfile"), 67)),
    **dict(enumerate(("pselect6", "ppoll"), 72)),
    **dict(enumerate(("splice", "tee"), 76)),
    **dict(enumerate(("fsync", "fdatasync", "sync_file_range"), 82)),
    95: "waitid",
    98: "futex",
    101: "nanosleep",
    115: "clock_nanosleep",
    133: "rt_sigsuspend",
    137: "rt_sigtimedwait",
    **dict(enumerate(("mq_timedsend", "mq_timedreceive"), 182)),
    **dict(enumerate(("msgrcv", "msgsnd"), 188)),
    **dict(enumerate(("semtimedop", "semop"), 192)),
    **dict(enumerate(("accept", "connect"), 202)),
    **dict(enumerate(("sendto", "recvfrom"), 206)),
    **dict(enumerate(("shutdown", "sendmsg", "recvmsg", "readahead"), 210)),
    **dict(enumerate(("clone", "execve"), 220)),
    **dict(enumerate(("accept4", "recvmmsg"), 242)),
    260: "wait4",
    269: "sendmmsg",
    **dict(enumerate(("copy_file_range", "preadv2", "pwritev2"), 285)),
    292: "io_pgetevents",
    **{number: name for number, name in _X86_NAMES.items() if number > 424},
}
"""From 424 on system calls have the same numbers on all architectures."""


class Syscalls(Struct, frozen=True):
    """The system call and user-mode registers of each thread."""

    known: Booleans
    """Whether the registers could be read and are valid; kernel threads have none."""

    number: Numbers
    """Number of the system call; :data:`NO_CALL` if the thread is in none."""

    arguments: Addresses
    """Arguments of the system call; shape (threads, 6)."""

    sp: Addresses
    """The stack pointer of user mode."""

    ip: Addresses
    """The instruction pointer of user mode."""

    fp: Addresses
    """The frame pointer register of user mode; some programs use it otherwise."""

    compat: Booleans
    """Whether 32-bit code made the call, whose number is of another table."""

    names: dict[int, str]
    """Names of calls that can wait, by number; empty if unknown."""

    def name(self, row: int) -> str | None:
        """Return the name of a thread's system call; ``None`` if unknown."""
        if not self.known[row] or self.compat[row]:
            return None
        return self.names.get(int(self.number[row]))


def read_syscalls(
    reader: Reader, tasks: TaskTable, stack_bytes: int, losses: LossLog
) -> Syscalls:
    """
    Read the saved registers of user mode, one read a thread.

    They are of the last entry into the kernel, so not current for a thread that runs in
    user mode now. On architectures except x86-64 and arm64 nothing is known.

    :param stack_bytes: size of a stack, from :func:`.unwind.stack_bytes`
    """
    size = _bytes_at_top(reader.prog)
    wanted = _have_user_mode(tasks)
    records = np.zeros((len(tasks), size), np.uint8)
    readable = np.zeros(len(tasks), np.bool_)
    if size:
        rows = np.flatnonzero(wanted)
        ends = tasks["stack"][rows].astype(np.uint64) + np.uint64(stack_bytes - size)
        records[rows], readable[rows] = reader.read_records(ends, size)
        lose_many(losses, "struct pt_regs", len(rows) - int(readable.sum()))
    return _decode(reader.prog, records, readable)


def syscalls_of(prog: drgn.Program, tasks: TaskTable, memory: StackMemory) -> Syscalls:
    """
    Return the system calls of threads whose stacks have been read.

    :param memory: The stacks of *tasks*, in their order.
    """
    size = _bytes_at_top(prog)
    readable = _have_user_mode(tasks) & (memory.size >= size)
    records = np.zeros((len(tasks), size), np.uint8)
    if size and readable.any():
        rows = np.flatnonzero(readable)
        ends = memory.first[rows] + (memory.size[rows] // 8).astype(np.intp)
        words = memory.words[ends[:, None] - size // 8 + np.arange(size // 8)]
        records[rows] = words.view(np.uint8)
    return _decode(prog, records, readable)


def _architecture(prog: drgn.Program) -> drgn.Architecture:
    platform = prog.platform
    return drgn.Architecture.UNKNOWN if platform is None else platform.arch


def _bytes_at_top(prog: drgn.Program) -> int:
    """Return the size of the registers at the end of a stack, with padding; or 0."""
    arch = _architecture(prog)
    if arch not in (drgn.Architecture.X86_64, drgn.Architecture.AARCH64):
        return 0
    size: int = drgn.sizeof(find_type(prog, "struct pt_regs"))
    return size + max(_X86_PADDINGS) if arch == drgn.Architecture.X86_64 else size


def _have_user_mode(tasks: TaskTable) -> Booleans:
    alive: Booleans = (tasks["stack"] != 0) & (tasks["exit_state"] == 0)
    alive &= (tasks["flags"] & PF_KTHREAD) == 0
    return alive


def _decode(
    prog: drgn.Program, records: npt.NDArray[np.uint8], readable: Booleans
) -> Syscalls:
    arch = _architecture(prog)
    if arch == drgn.Architecture.X86_64:
        return _x86(find_type(prog, "struct pt_regs"), records, readable)
    if arch == drgn.Architecture.AARCH64:
        return _arm64(find_type(prog, "struct pt_regs"), records, readable)
    return _unknown(len(records))


def _x86(
    regs: drgn.Type, records: npt.NDArray[np.uint8], readable: Booleans
) -> Syscalls:
    segment = offset_of(regs, "cs")

    def of_user(padding: int) -> Booleans:
        """Return which records have a code segment of user mode."""
        start = max(_X86_PADDINGS) - padding
        values = column(records, start + segment, 2)
        # Not np.isin(), which takes five times as long for some hundred tasks.
        valid: Booleans = readable & ((values == _USER_CS) | (values == _USER_CS32))
        return valid

    # Take the padding that fits most threads.
    padding = max(_X86_PADDINGS, key=lambda padding: int(of_user(padding).sum()))
    known = of_user(padding)
    start = max(_X86_PADDINGS) - padding
    compat = known & (column(records, start + segment, 2) == _USER_CS32)

    def values(name: str) -> Addresses:
        return column(records, start + offset_of(regs, name))

    arguments = np.stack([values(name) for name in _X86_ARGUMENTS], 1)
    if compat.any():
        narrow = np.stack([values(name) for name in _X86_ARGUMENTS32], 1)
        arguments[compat] = narrow[compat] & np.uint64(0xFFFF_FFFF)
    return Syscalls(
        known=known,
        number=np.where(known, values("orig_ax").astype(np.int64), NO_CALL),
        arguments=arguments,
        sp=values("sp"),
        ip=values("ip"),
        fp=values("bp"),
        compat=compat,
        names=_X86_NAMES,
    )


def _arm64(
    regs: drgn.Type, records: npt.NDArray[np.uint8], readable: Booleans
) -> Syscalls:
    def values(name: str, width: int = 8) -> Addresses:
        return column(records, offset_of(regs, name), width)

    # x0 is overwritten by the result.
    registers = [values("orig_x0"), *(values(f"regs[{n}]") for n in range(1, 6))]
    number = values("syscallno", 4).astype(np.uint32).astype(np.int32)
    # PSTATE.M: EL0 of AArch64 is 0, of AArch32 0x10.
    mode = values("pstate") & np.uint64(0x1F)
    known = readable & ((mode == 0) | (mode == 0x10))
    return Syscalls(
        known=known,
        number=np.where(known, number.astype(np.int64), NO_CALL),
        arguments=np.stack(registers, 1),
        sp=values("sp"),
        ip=values("pc"),
        fp=values("regs[29]"),
        compat=known & (mode == 0x10),
        names=_ARM64_NAMES,
    )


def _unknown(count: int) -> Syscalls:
    zeros = np.zeros(count, np.uint64)
    return Syscalls(
        known=np.zeros(count, np.bool_),
        number=np.full(count, NO_CALL, np.int64),
        arguments=np.zeros((count, 6), np.uint64),
        sp=zeros,
        ip=zeros,
        fp=zeros,
        compat=np.zeros(count, np.bool_),
        names={},
    )


# --- The children that threads in wait() wait for.
#
# kernel/exit.c: a waiting thread has a struct wait_opts on its stack, with an entry on
# the wait queue of its process (signal_struct.wait_chldexit, do_wait()). Since Linux
# kernel commit f31ecf671ddc ("io_uring: add IORING_OP_WAITID support") (in v6.7)
# io_uring may queue a struct wait_opts that is not on a stack.


# Bits of wo_flags; include/uapi/linux/wait.h.
_EXITED = 0x0000_0004
_NOTHREAD = 0x2000_0000
_ALL = 0x4000_0000
_CLONE = 0x8000_0000


Kind = Literal["any", "pid", "group"]


class WaitOpts(Struct, frozen=True):
    """A thread's wait for children (``struct wait_opts``)."""

    task: int
    """Address of the waiting ``struct task_struct``."""

    kind: Kind
    """Whether it waits for any child, one child, or those of a process group."""

    pid: int
    """Address of the ``struct pid`` of the child or group; 0 for any child."""

    number: int | None
    """Number of *pid* in the initial PID namespace; ``None`` for any child, or if
    unreadable."""

    flags: int
    """Options of wait4(2) and waitid(2)."""

    @property
    def exited(self) -> bool:
        """Whether a child's exit ends the wait, not only its stop or continuation."""
        return bool(self.flags & _EXITED)

    @property
    def own(self) -> bool:
        """Whether children of other threads are ignored (``__WNOTHREAD``)."""
        return bool(self.flags & _NOTHREAD)

    @property
    def all(self) -> bool:
        """Whether children count with whatever exit signal (``__WALL``)."""
        return bool(self.flags & _ALL)

    @property
    def clone(self) -> bool:
        """Whether children count only if their exit signal is not SIGCHLD
        (``__WCLONE``)."""
        return bool(self.flags & _CLONE) and not self.all


class WaitOptsReader:
    """Reads the ``struct wait_opts`` of one kernel.

    :raises MissingError: if the type or a member is missing
    """

    def __init__(self, reader: Reader) -> None:
        prog = reader.prog
        opts = find_type(prog, "struct wait_opts")
        self._type = offset_of(opts, "wo_type")
        self._flags = offset_of(opts, "wo_flags")
        self._pid = offset_of(opts, "wo_pid")
        self._entry = offset_of(opts, "child_wait")
        self._task = offset_of(opts, "child_wait.private")
        self._node = offset_of(opts, "child_wait.entry")
        self._size = drgn.sizeof(opts)
        process = find_type(prog, "struct signal_struct")
        self._queue = offset_of(process, "wait_chldexit.head")
        self._number = offset_of(find_type(prog, "struct pid"), "numbers[0].nr")
        kinds: dict[Kind, tuple[str, ...]] = {
            "any": ("PIDTYPE_MAX",),
            "pid": ("PIDTYPE_PID", "PIDTYPE_TGID"),
            "group": ("PIDTYPE_PGID",),
        }
        self._kinds: dict[int, Kind] = {
            find_constant(prog, name).value_(): kind
            for kind, names in kinds.items()
            for name in names
        }
        self._reader = reader

    def of_entry(self, entry: int) -> WaitOpts:
        """Read the wait whose entry in a wait queue is at *entry*.

        :raises drgn.FaultError: if it cannot be read
        :raises DamagedDataError: if it is not a wait for children
        """
        address = entry - self._entry
        return self._parse(address, self._reader.read(address, self._size))

    def of_process(self, process: int, losses: LossLog) -> Iterator[WaitOpts]:
        """Yield the waits of all threads of a process.

        A damaged queue is counted as lost, and read up to the damage.

        :param process: address of its ``struct signal_struct``
        """
        name = "the queue of who waits for children"
        head = process + self._queue
        records = list_records(self._reader, head, self._node, self._size, losses, name)
        for address, data in records:
            try:
                yield self._parse(address, data)
            except UNREADABLE as error:
                losses.lose(
                    Loss.WAITS, f"cannot determine what a thread waits for: {error}"
                )

    def _parse(self, address: int, data: bytes) -> WaitOpts:
        (type_,) = U32.unpack_from(data, self._type)
        kind = self._kinds.get(type_)
        (pid,) = U64.unpack_from(data, self._pid)
        if kind is None or (not pid and kind != "any"):
            raise DamagedDataError("no wait for children", address)
        (flags,) = U32.unpack_from(data, self._flags)
        (task,) = U64.unpack_from(data, self._task)
        if kind == "any":
            return WaitOpts(task, kind, 0, None, flags)
        return WaitOpts(task, kind, pid, self._pid_number(pid), flags)

    def _pid_number(self, pid: int) -> int | None:
        try:
            data = self._reader.read(pid + self._number, 4)
        except UNREADABLE:
            return None
        return int.from_bytes(data, "little")
