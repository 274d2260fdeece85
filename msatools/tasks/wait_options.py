# SPDX-License-Identifier: LGPL-2.1-or-later

"""The children that threads in wait() wait for.

kernel/exit.c: a waiting thread has a ``struct wait_opts`` on its stack, with an entry
on the wait queue of its process (``signal_struct.wait_chldexit``, do_wait()). Since
Linux kernel commit f31ecf671ddc ("io_uring: add IORING_OP_WAITID support") (in v6.7)
io_uring queues one that is not on a stack.
"""

from collections.abc import Iterator
from typing import Literal

import drgn
from msgspec import Struct

from msatools.errors import UNREADABLE, DamagedDataError
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.walks import list_records
from msatools.kernel.words import U32, U64
from msatools.selfdesc.find import find_constant, find_type, offset_of

# Bits of wo_flags; include/uapi/linux/wait.h.
_EXITED = 0x0000_0004
_NOTHREAD = 0x2000_0000
_ALL = 0x4000_0000
_CLONE = 0x8000_0000


Kind = Literal["any", "pid", "group"]


class WaitOpts(Struct, frozen=True):
    """A wait for children."""

    task: int
    """Address of the waiting ``struct task_struct``."""

    kind: Kind
    pid: int
    """Address of the ``struct pid`` of the child or group; 0 for any child."""

    number: int | None
    """The PID in the initial PID namespace; ``None`` if unreadable."""

    flags: int
    """Options of wait4(2) and waitid(2)."""

    @property
    def exited(self) -> bool:
        """Whether it waits for children to exit, not only to stop or continue."""
        return bool(self.flags & _EXITED)

    @property
    def own(self) -> bool:
        """Whether children of other threads are ignored (``__WNOTHREAD``)."""
        return bool(self.flags & _NOTHREAD)

    @property
    def all(self) -> bool:
        """Whether any exit signal of the child counts (``__WALL``)."""
        return bool(self.flags & _ALL)

    @property
    def clone(self) -> bool:
        """Whether only children with another exit signal than SIGCHLD count
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
        """Read the wait with a given entry of a wait queue.

        :raises drgn.FaultError: if it cannot be read, or is not a wait for children
        """
        address = entry - self._entry
        return self._parse(address, self._reader.read(address, self._size))

    def of_process(self, process: int, losses: LossLog) -> Iterator[WaitOpts]:
        """Read the waits of all threads of a process, one read each.

        A damaged queue is noted, and read up to the damage.

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
