# SPDX-License-Identifier: LGPL-2.1-or-later

"""Spinlocks that CPUs wait for: which, in a dump; how many CPUs, on a running kernel.

kernel/locking/qspinlock.c and qrwlock.c: only the registers and the stack of a CPU say
which lock it spins for, and the lock does not say who has it. So both are reported by
evidence, and only if there is no doubt.

The registers of a running CPU cannot be read. But a CPU that waits behind the next in
line uses one of its own nodes, and ``count`` of the first node is the number in use.
The next in line uses no node but sets a bit in the lock, so it is not counted; nor is
any CPU of a guest that spins without a queue (virt_spin_lock()).
"""

import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import drgn
import numpy as np
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.sched import cpu_curr

from msatools.kernel.cpumask import online_cpus
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, read_struct, struct_layout
from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Holder, Lock, Request
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.lock_type import LockType
from msatools.locks.base.model import Mode
from msatools.selfdesc.variables import find_variable
from msatools.target.addresses import KERNEL_HALF

_SPINS = frozenset(
    {
        "native_queued_spin_lock_slowpath",
        "queued_spin_lock_slowpath",
        "__pv_queued_spin_lock_slowpath",
    }
)
_MODES: dict[str, Mode] = {
    "queued_read_lock_slowpath": "read",
    "queued_write_lock_slowpath": "write",
}
_TAKES = ("_raw_", "do_raw_", "queued_", "native_queued_", "__pv_queued_")
_REGISTERS = ("rdi", "rbx", "rbp", "rsi", *(f"r{number}" for number in range(8, 16)))
_TOP_BYTES = 512
"""Of the stack above the function that spins, where it has saved registers."""

_MAX_STACK = 1 << 16
_BEHIND = 256
"""Bytes that are read above the last frame on a stack of interrupts."""

_LOCKED = (1, 3)
"""``_Q_LOCKED_VAL``, and ``_Q_SLOW_VAL`` (qspinlock_paravirt.h)."""

_TAIL_SHIFT = 16
"""``_Q_TAIL_OFFSET``, with fewer than 16,384 CPUs (CONFIG_NR_CPUS)."""

_HALF = struct.Struct("<I")

MOST_NODES = 4
"""``_Q_MAX_NODES``: for a task, a softirq, an interrupt and an NMI."""

# Since Linux kernel commit 0fa809ca7f81 ("locking/pvqspinlock: Extend node size when
# pvqspinlock is configured") (in v4.20).
_NODE = "struct qnode"
_COUNT: Members = {"count": ("mcs.count",)}
"""How many nodes of its own a CPU uses, in the first of them."""

ANY = Lock("spinlock", None)
"""What such CPUs wait for: not one lock, but any."""

ANY_ID = "spinlock -"
ANY_NAME = "which: only registers of running CPUs say"


@dataclass(frozen=True)
class Spin:
    """A task whose CPU spins for a lock."""

    row: int
    """In the table of tasks."""

    request: Request
    holders: tuple[Holder, ...]
    """Tasks that probably own it."""

    caller: str | None
    """The function that takes it."""


@dataclass(frozen=True)
class _Cpu:
    """What a CPU was doing when the dump was made."""

    number: int
    task: int
    frames: list[drgn.StackFrame]
    """Without those of inline functions and of user mode."""

    spinning: int | None
    """Which of the frames is that of a function that waits for a spinlock."""


def spins(context: LockContext, stack_size: int) -> list[Spin]:
    """
    Return which tasks spin, for which lock, and who seems to have that.

    The type of a lock for readers and writers is ``spinlock``, too, with a mode.

    :param stack_size: Bytes of a kernel stack.
    :return: Nothing of a running kernel.
    """
    prog = context.reader.prog
    if prog.flags & drgn.ProgramFlags.IS_LIVE:
        return []
    cpus = list(_cpus(context))
    spinning = {cpu.number for cpu in cpus if cpu.spinning is not None}
    wanted = {
        cpu.number: request
        for cpu in cpus
        if cpu.spinning is not None
        and (request := _request(context, cpu, cpu.spinning, spinning)) is not None
    }
    seen = {
        cpu.number: _words(context, cpu, stack_size)
        for cpu in cpus
        # Whose lock is not known may have any of the others.
        if wanted and (cpu.number in wanted or cpu.spinning is None)
    }
    rows = {
        address: row for row, address in enumerate(context.tasks["address"].tolist())
    }
    found = []
    for cpu in cpus:
        request = wanted.get(cpu.number)
        if request is None or cpu.task not in rows:
            continue
        holders = [
            Holder(other.task, "evidence")
            for other in cpus
            if not _waits_for(wanted.get(other.number), request.lock)
            and request.lock.address in seen.get(other.number, ())
        ]
        # Many may read at once, but just one has any other lock.
        sure = len(holders) == 1 or request.mode is not None
        found.append(
            Spin(
                rows[cpu.task],
                request,
                tuple(holders if sure else ()),
                _caller(context, cpu),
            )
        )
    return found


def _waits_for(request: Request | None, lock: Lock) -> bool:
    return request is not None and request.lock == lock


def _cpus(context: LockContext) -> Iterator[_Cpu]:
    prog = context.reader.prog
    for number in online_cpus(context.reader, context.losses):
        try:
            task = cpu_curr(prog, number)
            trace = prog.stack_trace(task)
            frames = [f for f in trace if not f.is_inline and f.pc >= KERNEL_HALF]
        except (drgn.FaultError, LookupError, ValueError) as error:
            context.losses.lose(Loss.CPUS, f"what a CPU was doing is lost: {error}")
            continue
        names = [_name(context, frame) for frame in frames]
        places = [
            place
            for place, name in enumerate(names)
            if name in _SPINS or name in _MODES
        ]
        yield _Cpu(number, task.value_(), frames, places[0] if places else None)


def _caller(context: LockContext, cpu: _Cpu) -> str | None:
    """Name the first function above those that take a spinlock."""
    above = cpu.frames[(cpu.spinning or 0) + 1 :]
    names = (_name(context, frame) for frame in above)
    return next((name for name in names if not name.startswith(_TAKES)), None)


def _name(context: LockContext, frame: drgn.StackFrame) -> str:
    return (context.function(frame) or "").partition(".")[0]


def _request(
    context: LockContext, cpu: _Cpu, place: int, spinning: set[int]
) -> Request | None:
    """Return the lock that a CPU spins for, if its registers or its stack tell one."""
    frame, within = cpu.frames[place], 0
    name = _name(context, frame)
    above = _name(context, cpu.frames[place + 1]) if place + 1 < len(cpu.frames) else ""
    mode = _MODES.get(name) or _MODES.get(above)
    queue = context.layout.offset("qrwlock", "wait_lock") if mode else 0
    if name in _SPINS:
        # The next in line for such a lock spins for it, the others for that place.
        within = queue
    registers = frame.registers()
    told = [registers[name] for name in _REGISTERS if name in registers]
    address = _only(context, told, queue - within, spinning)
    if address is None:
        pointer = _pointer(frame)
        stack = _read(context, pointer, pointer + _TOP_BYTES)
        address = _only(context, stack, queue - within, spinning)
    return (
        None if address is None else Request(Lock("spinlock", address - within), mode)
    )


def _only(
    context: LockContext, words: list[int], queue: int, spinning: set[int]
) -> int | None:
    """Choose the one word that is the address of a lock, the most frequent of them.

    :param queue: Where in what is pointed at the queue is.
    """
    counts = Counter(
        word
        for word in words
        if word >= context.layout.kernel_start
        and word % 4 == 0
        and _is_wanted(context, word + queue, spinning)
    )
    (first, second) = [*counts.most_common(2), (0, 0), (0, 0)][:2]
    return first[0] if first[1] > second[1] else None


def _is_wanted(context: LockContext, address: int, spinning: set[int]) -> bool:
    """Return whether what is at an address may be a qspinlock that CPUs wait for."""
    try:
        (value,) = _HALF.unpack(context.reader.read(address, _HALF.size))
        if not may_be_wanted(value):
            return False
        tail = value >> _TAIL_SHIFT
        return not tail or _is_queued(context, tail, spinning)
    except drgn.FaultError:
        return False


def may_be_wanted(value: int) -> bool:
    """
    Return whether a word may be a qspinlock that is not free.

    Under a hypervisor CPUs spin without a queue (virt_spin_lock()), and so does the
    next in line.
    """
    locked, pending = value & 0xFF, value >> 8 & 0xFF
    if pending > 1:
        return False
    return locked in _LOCKED or (not locked and value >> _TAIL_SHIFT != 0)


def _is_queued(context: LockContext, tail: int, spinning: set[int]) -> bool:
    """Return whether the CPU at the end of a queue spins, at such a depth."""
    cpu, depth = (tail >> 2) - 1, tail & 3
    if cpu not in spinning:
        return False
    try:
        nodes = find_variable(context.reader.prog, "qnodes")
    except LookupError:
        return True
    return bool(per_cpu(nodes, cpu)[0].mcs.count.value_() > depth)


def _words(context: LockContext, cpu: _Cpu, stack_size: int) -> frozenset[int]:
    """Read the registers of a CPU, and what it has on its stacks."""
    if not cpu.frames:
        return frozenset()  # it was in user mode: it has no spinlock
    found = set(cpu.frames[0].registers().values())
    try:
        start = context.layout.member(cpu.task, "task_struct", "stack")
    except drgn.FaultError:
        return frozenset(found)
    end = start + stack_size
    pointers = [pointer for frame in cpu.frames if (pointer := _pointer(frame))]
    own = [pointer for pointer in pointers if start <= pointer < end]
    others = [pointer for pointer in pointers if not start <= pointer < end]
    if own:
        found.update(_read(context, min(own), end))
    if others:
        found.update(_read(context, min(others), max(others) + _BEHIND))
    return frozenset(found)


def _pointer(frame: drgn.StackFrame) -> int:
    """Return a frame's stack pointer; 0 if it is not known, or none of the kernel's."""
    try:
        pointer: int = frame.sp
    except LookupError:
        return 0
    return pointer if pointer >= KERNEL_HALF else 0


def _read(context: LockContext, start: int, end: int) -> list[int]:
    """Read words; as many as there are before a part that cannot be read."""
    size = end - start
    if not start or not 0 < size <= _MAX_STACK or start % 8:
        return []
    data, gaps = context.reader.read_around_gaps(start, size, 8)
    readable = min((gap.offset for gap in gaps), default=size)
    words: list[int] = np.frombuffer(data, "<u8", readable // 8).tolist()
    return words


def _no_sleeper(context: LockContext, case: BlockedTask) -> Sequence[Request]:
    """Nobody sleeps for a spinlock: :func:`spins` finds those that wait."""
    return ()


class SpinQueues:
    """Where each CPU says whether it is in a queue for a spinlock."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses
        self._nodes = _nodes(reader, losses)

    def waiting(self) -> int:
        """Return how many online CPUs are in a queue; 0 of a kernel without queues.

        :raises drgn.FaultError: if that cannot be read
        """
        if not self._nodes:
            return 0
        online = online_cpus(self._reader, self._losses)
        places = (self._nodes.get(cpu) for cpu in online)
        return sum(self._waits(address) for address in places if address is not None)

    def _waits(self, address: int) -> bool:
        count: int = read_struct(self._reader, _NODE, _COUNT, address)["count"]
        return 0 < count <= MOST_NODES


def _nodes(reader: Reader, losses: LossLog) -> Mapping[int, int]:
    """Return the address of each possible CPU's first ``struct qnode``."""
    try:
        percpu = read_percpu(reader, losses)
        if struct_layout(reader, _NODE, _COUNT) is None:
            return {}
        nodes = percpu.addresses("qnodes")
    except (LookupError, drgn.FaultError):
        return {}
    return dict(zip(percpu.cpus.tolist(), nodes.tolist(), strict=True))


SPINLOCK = LockType(names=frozenset({"spinlock"}), requests=_no_sleeper)
