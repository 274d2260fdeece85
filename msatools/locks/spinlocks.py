# SPDX-License-Identifier: LGPL-2.1-or-later

"""Spinlocks that CPUs spin for.

In a dump these are found with likely holders; on a running kernel the CPUs are counted.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import drgn
import numpy as np
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.sched import cpu_curr
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.code import stack_trace
from msatools.kernel.percpu import online_cpus, read_percpu
from msatools.kernel.reader import U32, Reader
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import Members, read_struct, struct_layout
from msatools.locks.context import BlockedTask, LockContext, LockType
from msatools.locks.report import Holder, Lock, Mode, Request
from msatools.program.arch import START_KERNEL_MAP
from msatools.program.linear import KERNEL_HALF
from msatools.selfdesc.find import ask, find_variable
from msatools.tasks.preemption import PreemptCounts, preemption_count, softirq_count
from msatools.tasks.running_stacks import NMI, USER_MODE, CpuStack, StackReader
from msatools.tasks.text import KernelText

# --- Code that refers to a static lock, whose owner need not keep the lock's address.
#
# On x86-64 the address of a static variable is part of the instruction that passes it
# to the locking function: as a 32-bit constant, or as a distance from the instruction.


_BYTES = 1024
"""Bytes of code to search before the current instruction of a function."""

_LOW = np.uint64((1 << 32) - 1)


def refers_to(
    reader: Reader, text: KernelText, pcs: Sequence[int], address: int
) -> bool:
    """Return whether any function on a stack refers to a variable before its call.

    :param pcs: Program counters of the frames.
    :param address: Address of the variable.
    """
    if address < START_KERNEL_MAP:
        # The address fits no 32-bit constant, and is not near any code.
        return False
    return any(_refers(reader, text, pc, address) for pc in pcs)


def _refers(reader: Reader, text: KernelText, pc: int, address: int) -> bool:
    start = pc - _BYTES
    try:
        data, _ = reader.read_around_gaps(start, _BYTES, 8)
    except UNREADABLE:
        return False
    code = np.frombuffer(data, np.uint8).astype(np.uint64)
    last = len(code) - 3
    if last <= 0:
        return False
    words = sum(
        (code[shift : shift + last] << np.uint64(8 * shift) for shift in range(4)),
        np.zeros(last, np.uint64),
    )
    ends = np.uint64(start) + np.arange(4, last + 4, dtype=np.uint64)
    wanted = np.uint64(address) & _LOW
    found = (words == wanted) | ((words + ends) & _LOW == wanted)
    function = text.name(pc - 1)
    return any(
        text.name(start + at) == function for at in np.flatnonzero(found).tolist()
    )


# --- Spinlocks that CPUs spin for, in a dump, and their likely holders.
#
# kernel/locking/qspinlock.c and qrwlock.c: only the registers and the stack of a CPU
# have the address of the lock that it spins for, and the lock does not record its
# owner. So the lock and its holder are found by evidence, and reported only if that is
# unambiguous: a holder has the lock's address in a register or on its stack, or, for a
# static lock, in its code. msa-cpus --stalls calls spins(), too.


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
"""Bytes of the stack that are searched for registers that the spinning function
saved."""

_MAX_STACK = 1 << 16
_PAST_LAST_FRAME = 256
"""Bytes that are read past the last frame on an interrupt stack."""

_LOCKED = (1, 3)
"""``_Q_LOCKED_VAL``, and ``_Q_SLOW_VAL`` (qspinlock_paravirt.h)."""

_TAIL_SHIFT = 16
"""``_Q_TAIL_OFFSET``, with fewer than 16,384 CPUs (CONFIG_NR_CPUS)."""


class Spin(Struct, frozen=True):
    """A task whose CPU spins for a lock."""

    row: int
    """Row in the table of tasks."""

    request: Request
    holders: tuple[Holder, ...]
    """Tasks that probably hold the lock."""

    caller: str | None
    """The function that takes the lock."""


class _Cpu(Struct, frozen=True):
    """What a CPU was doing when the dump was made."""

    number: int
    task: int
    frames: list[drgn.StackFrame]
    """Frames of kernel functions, without inlined ones."""

    spinning: int | None
    """Index of the frame whose function waits for a spinlock; ``None`` if none does."""


def spins(context: LockContext, stack_size: int) -> list[Spin]:
    """
    Return the tasks whose CPUs spin, with the lock and its likely holders.

    The type of an rwlock is ``spinlock``, too; its requests have a mode.

    :param stack_size: Bytes of a kernel stack.
    :return: Empty on a running kernel.
    """
    prog = context.reader.prog
    if prog.flags & drgn.ProgramFlags.IS_LIVE:
        return []
    cpus = list(_cpus(context))
    spinning = {cpu.number for cpu in cpus if cpu.spinning is not None}
    requests = {
        cpu.number: request
        for cpu in cpus
        if cpu.spinning is not None
        and (request := _request(context, cpu, cpu.spinning, spinning)) is not None
    }
    # A CPU that spins for an unknown lock may wait for any of these, so it is not
    # searched for holders.
    words = {
        cpu.number: _words(context, cpu, stack_size)
        for cpu in cpus
        if requests and (cpu.number in requests or cpu.spinning is None)
    }
    rows = {
        address: row for row, address in enumerate(context.tasks["address"].tolist())
    }
    others = _MayHold(context, cpus)
    found = []
    for cpu in cpus:
        request = requests.get(cpu.number)
        if request is None or cpu.task not in rows:
            continue
        holders = _likely_holders(request, cpus, requests, words)
        if not holders and request.mode is None:
            holders = others.of(request.lock.address or 0)
        found.append(Spin(rows[cpu.task], request, holders, _caller(context, cpu)))
    return found


def _likely_holders(
    request: Request,
    cpus: Sequence[_Cpu],
    requests: Mapping[int, Request],
    words: Mapping[int, frozenset[int]],
) -> tuple[Holder, ...]:
    """
    Return the tasks on CPUs that have the address of a lock and do not wait for it.

    :param requests: The lock that each CPU spins for, by CPU number.
    :param words: Values in registers and on stacks, by CPU number.
    :return: Empty if there are several for a lock that has a single owner.
    """
    lock = request.lock
    waiting = {number for number, other in requests.items() if other.lock == lock}
    holders = tuple(
        Holder(cpu.task, "evidence")
        for cpu in cpus
        if cpu.number not in waiting and lock.address in words.get(cpu.number, ())
    )
    # An rwlock may have many readers.
    return holders if len(holders) == 1 or request.mode is not None else ()


class _MayHold:
    """The CPUs that may hold a spinlock: with interrupts or preemption disabled."""

    def __init__(self, context: LockContext, cpus: Sequence[_Cpu]) -> None:
        self._context = context
        self._cpus = [each for each in cpus if each.spinning is None and each.frames]

    def of(self, address: int) -> tuple[Holder, ...]:
        """Return the task whose code refers to a static lock; empty if there are
        several."""
        reader, text = self._context.reader, self._context.text
        found = [
            task
            for task, stack in self._stacks
            if refers_to(reader, text, stack.pcs, address)
        ]
        return (Holder(found[0], "evidence"),) if len(found) == 1 else ()

    @cached_property
    def _stacks(self) -> list[tuple[int, CpuStack]]:
        """Tasks that have disabled interrupts, softirqs or preemption, with stacks."""
        context = self._context
        stacks = StackReader(context.reader, context.text, context.losses)
        percpu = read_percpu(context.reader, context.losses)
        running = {each.number: each.task for each in self._cpus}
        addresses = [running.get(cpu, 0) for cpu in percpu.cpus.tolist()]
        counts = PreemptCounts(
            context.reader,
            percpu,
            lambda: np.array(addresses, np.uint64),
            context.losses,
        ).by_cpu
        found = []
        for cpu in self._cpus:
            stack = stacks.read(cpu.task)
            if stack is None or stack.names[:1] == (USER_MODE,):
                continue
            count = counts.get(cpu.number, 0)
            disabled = preemption_count(count) or softirq_count(count)
            if disabled or _interrupts_are_off(stack):
                found.append((cpu.task, stack))
        return found


def _interrupts_are_off(stack: CpuStack) -> bool:
    """Return whether interrupts were off, or, in an NMI, were off when it came."""
    nmis = [at for at, name in enumerate(stack.names) if name.startswith(NMI)]
    below = max(nmis, default=-1) + 1
    states = [stack.flags[at] for at in sorted(stack.flags) if at >= below]
    return states[:1] == ["off"]


def _cpus(context: LockContext) -> Iterator[_Cpu]:
    prog = context.reader.prog
    for number in online_cpus(context.reader, context.losses):
        try:
            task = ask(cpu_curr, prog, number)
        except LOST as error:
            context.losses.lose(
                Loss.CPUS, f"cannot determine what a CPU was doing: {error}"
            )
            continue
        trace = stack_trace(prog, task)
        if trace is None:
            context.losses.lose(Loss.CPUS, "cannot read what a CPU was doing: no stack")
            continue
        frames = [f for f in trace if not f.is_inline and f.pc >= KERNEL_HALF]
        names = [_name(context, frame) for frame in frames]
        slow_paths = (
            index
            for index, name in enumerate(names)
            if name in _SPINS or name in _MODES
        )
        yield _Cpu(number, task.value_(), frames, next(slow_paths, None))


def _caller(context: LockContext, cpu: _Cpu) -> str | None:
    """Return the name of the function that called the spinlock functions."""
    callers = cpu.frames[(cpu.spinning or 0) + 1 :]
    names = (_name(context, frame) for frame in callers)
    return next((name for name in names if not name.startswith(_TAKES)), None)


def _name(context: LockContext, frame: drgn.StackFrame) -> str:
    return (context.function(frame) or "").partition(".")[0]


def _request(
    context: LockContext, cpu: _Cpu, index: int, spinning: set[int]
) -> Request | None:
    """
    Find the lock that a CPU spins for in its registers, then on its stack.

    :param index: Index of the frame that spins.
    :param spinning: Numbers of all CPUs that spin.
    :return: ``None`` if not found.
    """
    frame = cpu.frames[index]
    name = _name(context, frame)
    caller = (
        _name(context, cpu.frames[index + 1]) if index + 1 < len(cpu.frames) else ""
    )
    mode = _MODES.get(name) or _MODES.get(caller)
    wait_lock = context.layout.offset("qrwlock", "wait_lock") if mode else 0
    # The next in line for an rwlock spins on the rwlock itself; the others spin on its
    # wait_lock, and have a pointer to that.
    start = wait_lock if name in _SPINS else 0
    registers = frame.registers()
    words = [registers[name] for name in _REGISTERS if name in registers]
    address = _choose_lock(context, words, wait_lock - start, spinning)
    if address is None:
        pointer = _stack_pointer(frame)
        words = _read_words(context, pointer, pointer + _TOP_BYTES)
        address = _choose_lock(context, words, wait_lock - start, spinning)
    if address is None:
        return None
    return Request(Lock("spinlock", address - start), mode)


def _choose_lock(
    context: LockContext, words: list[int], offset: int, spinning: set[int]
) -> int | None:
    """
    Choose the word that may be the address of a lock, the most frequent if several may.

    :param offset: Offset of the qspinlock from that address.
    :return: ``None`` if there is no such word, or in case of a tie.
    """
    counts = Counter(
        word
        for word in words
        if word >= context.layout.kernel_start
        and word % 4 == 0
        and _is_wanted(context, word + offset, spinning)
    )
    (first, second) = [*counts.most_common(2), (0, 0), (0, 0)][:2]
    return first[0] if first[1] > second[1] else None


def _is_wanted(context: LockContext, address: int, spinning: set[int]) -> bool:
    """Return whether an address may be that of a qspinlock that CPUs wait for."""
    try:
        (value,) = U32.unpack(context.reader.read(address, U32.size))
        if not may_be_wanted(value):
            return False
        tail = value >> _TAIL_SHIFT
        return not tail or _is_queued(context, tail, spinning)
    except UNREADABLE:
        return False


def may_be_wanted(value: int) -> bool:
    """
    Return whether a value may be that of a qspinlock that is not free.

    The queue may be empty: the next in line, and CPUs under a hypervisor
    (virt_spin_lock()), spin without one.
    """
    locked, pending = value & 0xFF, value >> 8 & 0xFF
    if pending > 1:
        return False
    return locked in _LOCKED or (not locked and value >> _TAIL_SHIFT != 0)


def _is_queued(context: LockContext, tail: int, spinning: set[int]) -> bool:
    """Return whether the CPU in a lock's tail spins and uses the tail's node."""
    cpu, node = (tail >> 2) - 1, tail & 3
    if cpu not in spinning:
        return False
    try:
        nodes = find_variable(context.reader.prog, "qnodes")
    except MissingError:
        return True
    return bool(ask(per_cpu, nodes, cpu)[0].mcs.count.value_() > node)


def _words(context: LockContext, cpu: _Cpu, stack_size: int) -> frozenset[int]:
    """Return the values of a CPU's registers and the words of its stacks."""
    if not cpu.frames:
        return frozenset()  # in user mode a CPU holds no spinlock
    words = set(cpu.frames[0].registers().values())
    try:
        start = context.layout.member(cpu.task, "task_struct", "stack")
    except UNREADABLE:
        return frozenset(words)
    end = start + stack_size
    pointers = [pointer for frame in cpu.frames if (pointer := _stack_pointer(frame))]
    own = [pointer for pointer in pointers if start <= pointer < end]
    others = [pointer for pointer in pointers if not start <= pointer < end]
    if own:
        words.update(_read_words(context, min(own), end))
    if others:
        words.update(_read_words(context, min(others), max(others) + _PAST_LAST_FRAME))
    return frozenset(words)


def _stack_pointer(frame: drgn.StackFrame) -> int:
    """Return a frame's stack pointer; 0 if unknown, or not a kernel address."""
    try:
        pointer: int = frame.sp
    except MissingError:
        return 0
    return pointer if pointer >= KERNEL_HALF else 0


def _read_words(context: LockContext, start: int, end: int) -> list[int]:
    """Read the words of a range, up to the first that cannot be read."""
    size = end - start
    if not start or not 0 < size <= _MAX_STACK or start % 8:
        return []
    data, gaps = context.reader.read_around_gaps(start, size, 8)
    readable = min((gap.offset for gap in gaps), default=size)
    words: list[int] = np.frombuffer(data, "<u8", readable // 8).tolist()
    return words


def _no_requests(context: LockContext, case: BlockedTask) -> Sequence[Request]:
    """Return nothing: tasks do not sleep for a spinlock; see :func:`spins`."""
    return ()


SPINLOCK = LockType(names=frozenset({"spinlock"}), requests=_no_requests)


# --- The number of CPUs in queues for spinlocks, on a running kernel.
#
# kernel/locking/qspinlock.c: registers of a running CPU cannot be read. But a CPU that
# is queued after the next in line uses one of its own nodes, and count of its first
# node is the number of nodes in use. The next in line uses no node but sets a bit in
# the lock, so it is not counted. Neither is a CPU of a guest that spins without a queue
# (virt_spin_lock()).


MAX_NODES = 4
"""``_Q_MAX_NODES``: for a task, a softirq, an interrupt and an NMI."""

# Since Linux kernel commit 0fa809ca7f81 ("locking/pvqspinlock: Extend node size when
# pvqspinlock is configured") (in v4.20).
_NODE = "struct qnode"
_COUNT: Members = {"count": ("mcs.count",)}
"""Number of nodes that a CPU uses; kept in the first of them."""

ANY = Lock("spinlock", None)
"""Stands for all spinlocks: which one a queued CPU waits for is unknown."""

ANY_ID = "spinlock -"
ANY_NAME = "which: only registers of running CPUs say"


class SpinQueues:
    """Counts the CPUs that are in a queue for a spinlock."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses
        self._nodes = _first_nodes(reader, losses)

    def waiting(self) -> int:
        """Return the number of online CPUs in a queue; 0 on a kernel without queues.

        :raises drgn.FaultError: if a node cannot be read
        """
        if not self._nodes:
            return 0
        online = online_cpus(self._reader, self._losses)
        nodes = (self._nodes.get(cpu) for cpu in online)
        return sum(self._is_used(node) for node in nodes if node is not None)

    def _is_used(self, node: int) -> bool:
        count: int = read_struct(self._reader, _NODE, _COUNT, node)["count"]
        return 0 < count <= MAX_NODES


def _first_nodes(reader: Reader, losses: LossLog) -> Mapping[int, int]:
    """Return the address of the first ``struct qnode`` of each possible CPU."""
    try:
        percpu = read_percpu(reader, losses)
        if struct_layout(reader, _NODE, _COUNT) is None:
            return {}
        nodes = percpu.addresses("qnodes")
    except LOST:
        return {}
    return dict(zip(percpu.cpus.tolist(), nodes.tolist(), strict=True))
