# SPDX-License-Identifier: LGPL-2.1-or-later

"""Functions that CPUs asked each other to run, and CPUs that stop_machine() awaits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from msatools.cpus.model import CrossCall, StopMachine
from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import Members, find_offset, read_struct, read_structs
from msatools.selfdesc.find import find_type
from msatools.tasks.identity import comm_text
from msatools.tasks.table import TaskReader

# --- Functions that CPUs asked each other to run, and that have not run yet.
#
# kernel/smp.c: each CPU has a queue (call_single_queue), which an interrupt empties.
# A caller that waits has the structure of its call on its stack, or in its CPU's
# cfd_data if it called several CPUs at once. Work that a CPU has put off to an
# interrupt of its own is in two more lists (kernel/irq_work.c).


_TYPE_MASK = 0xF0
"""CSD_FLAG_TYPE_MASK; the next line has the types (include/linux/smp_types.h)."""

_ASYNC, _SYNC, _IRQ_WORK, _WAKE_UP = 0x00, 0x10, 0x20, 0x30

_CALL: Members = {
    # The node has had a type of its own since "smp, irq_work: Continue
    # smp_call_function*() and irq_work*() integration" (in v5.9).
    "next": ("node.llist.next", "llist.next"),
    "flags": ("node.u_flags", "flags"),
    "function": ("func",),
}
_IRQ_WORK_MEMBERS: Members = {"function": ("func",)}
_CALLS: Members = {
    # From v5.13 to v6.3 ``pcpu``, a structure that begins with the call
    # ("locking/csd_lock: Add more data to CSD lock debugging", and its removal).
    "calls": ("csd", "pcpu"),
}

_MAX_QUEUE = 64
"""Maximum number of calls that are read from one list."""

_OWN_WORKS = ("raised_list", "lazy_list")
"""Lists of a CPU's own works: for the next interrupt, and for the next tick."""

_MAX_STACK = 1 << 16

Kind = Literal["call", "async", "irq-work", "wake-up"]

_KINDS: Mapping[int, Kind] = {
    _ASYNC: "async",
    _SYNC: "call",
    _IRQ_WORK: "irq-work",
    _WAKE_UP: "wake-up",
}


class _Callers(Struct, frozen=True):
    """The memory in which calling CPUs have the structures of their calls, by CPU."""

    stacks: Mapping[int, int]
    """Start of the stack of the task that each CPU runs."""

    stack_bytes: int
    calls: Mapping[int, int]
    """Per-CPU pointer of each CPU for calls of several CPUs at once (``cfd_data``)."""

    offsets: Mapping[int, int]
    """Offset of each CPU's per-CPU variables."""

    def find(self, call: int, cpu: int) -> int | None:
        """Return the CPU that asked *cpu* to run the call at an address, if known."""
        for other, start in self.stacks.items():
            if start <= call < start + self.stack_bytes:
                return other
        wanted = (call - self.offsets.get(cpu, 0)) & (1 << 64) - 1
        return next((o for o, at in self.calls.items() if at == wanted), None)


def read_calls(
    reader: Reader,
    percpu: PerCpu,
    cpus: Sequence[int],
    stacks: Mapping[int, int],
    stack_bytes: int,
    name: Callable[[int], str | None],
    losses: LossLog,
    *,
    own_works: bool = True,
) -> tuple[CrossCall, ...]:
    """Return the calls that are queued for some CPUs.

    A queue that is not empty is no sign of a stall by itself: it is emptied within
    microseconds, unless the CPU takes no interrupts.

    :param cpus: The CPUs whose queues to read.
    :param stacks: Start of the stack of the task that each CPU runs, by CPU.
    :param stack_bytes: Size of a stack.
    :param name: Returns the function at an address.
    :param own_works: Whether to add work that a CPU has put off to an interrupt of its
        own, which no other CPU asked for.
    """
    try:
        heads = percpu.addresses("call_single_queue").tolist()
        is_known = find_offset(
            find_type(reader.prog, "struct __call_single_data"), ("node.llist", "llist")
        )
    except MissingError:
        return ()
    if is_known is None:
        return ()
    of_cpu = dict(zip(percpu.cpus.tolist(), heads, strict=True))
    callers = _Callers(
        stacks=stacks,
        stack_bytes=min(stack_bytes, _MAX_STACK),
        calls=_read_pointers(reader, percpu, losses),
        offsets=dict(zip(percpu.cpus.tolist(), percpu.offsets.tolist(), strict=True)),
    )
    found: list[tuple[CrossCall, int]] = []
    works = _read_work_lists(percpu) if own_works else {}
    for cpu in cpus:
        if cpu in of_cpu:
            found += _queued(reader, cpu, of_cpu[cpu], callers, name, losses)
            for head in works.get(cpu, ()):
                found += _queued(reader, cpu, head, callers, name, losses)
    return tuple(_with_tasks(reader, found, losses))


def _read_work_lists(percpu: PerCpu) -> Mapping[int, tuple[int, ...]]:
    """Return by CPU the addresses of the heads of its lists of ``struct irq_work``."""
    lists = []
    for variable in _OWN_WORKS:
        try:
            lists.append(percpu.addresses(variable).tolist())
        except MissingError:
            continue  # CONFIG_IRQ_WORK=n, or variables without symbols
    rows = zip(*lists, strict=True) if lists else ()
    return dict(zip(percpu.cpus.tolist(), rows, strict=bool(lists)))


def _with_tasks(
    reader: Reader, found: Sequence[tuple[CrossCall, int]], losses: LossLog
) -> Iterator[CrossCall]:
    """Yield the calls; add to each wake-up the task that is to be woken.

    The structure of such a call is ``task_struct.wake_entry`` since "smp, irq_work:
    Continue smp_call_function*() and irq_work*() integration" (in v5.9).
    """
    entry = find_offset(find_type(reader.prog, "struct task_struct"), ("wake_entry",))
    wakes = [call.kind == "wake-up" and at > (entry or at) for call, at in found]
    tasks = [at - (entry or 0) for _, at in found]
    task_reader = reader.once(TaskReader, lambda: TaskReader(reader))
    wanted = {task for task, is_one in zip(tasks, wakes, strict=True) if is_one}
    table = task_reader.read(sorted(wanted), losses)
    rows = {address: row for row, address in enumerate(table["address"].tolist())}
    for (call, _), task in zip(found, tasks, strict=True):
        row = rows.get(task) if task in wanted else None
        if row is None:
            yield call
            continue
        comm = comm_text(table["comm"][row])
        yield replace(call, pid=int(table["pid"][row]), comm=comm)


def _queued(
    reader: Reader,
    cpu: int,
    head: int,
    callers: _Callers,
    name: Callable[[int], str | None],
    losses: LossLog,
) -> Iterator[tuple[CrossCall, int]]:
    """Yield each call in the list at *head*, with the address of its structure."""
    try:
        call = int(reader.words(head, 1)[0])
        for _ in range(_MAX_QUEUE):
            if not call:
                return
            read = read_struct(reader, "struct __call_single_data", _CALL, call)
            kind = _KINDS.get(read.get("flags", 0) & _TYPE_MASK, "async")
            function = _function(reader, call, kind, read)
            queued = CrossCall(
                cpu=cpu,
                function=name(function) if function else None,
                caller=callers.find(call, cpu) if kind == "call" else None,
                kind=kind,
            )
            yield queued, call
            call = read["next"]
    except LOST as error:
        losses.lose(
            Loss.LISTS, f"cannot determine what CPU {cpu} is asked to run: {error}"
        )


def _function(
    reader: Reader, call: int, kind: Kind, read: Mapping[str, Any]
) -> int | None:
    if kind == "wake-up":
        return None
    if kind == "irq-work":
        work = read_struct(reader, "struct irq_work", _IRQ_WORK_MEMBERS, call)
        return int(work["function"])
    return int(read["function"])


def _read_pointers(
    reader: Reader, percpu: PerCpu, losses: LossLog
) -> Mapping[int, int]:
    try:
        data = read_structs(
            reader,
            "struct call_function_data",
            _CALLS,
            percpu.addresses("cfd_data"),
            losses,
        )
    except MissingError:
        return {}
    if not data.has("calls"):
        return {}
    pointers = data["calls"].tolist()
    return dict(zip(percpu.cpus.tolist(), pointers, strict=True))


# --- stop_machine(): CPUs that have stopped, and those that are awaited.
#
# kernel/stop_machine.c: the stopper thread of each CPU takes multi_cpu_stop() off the
# list of its works, and spins in it until all others are there.


_STOPPER: Members = {
    "first": ("works.next",),
    # Since a8b62fd08505 ("stop_machine: Add function and caller debug info") (in
    # v5.11); before, who has stopped is not recorded.
    "function": ("fn",),
}
_WORK: Members = {
    "next": ("list.next",),
    "function": ("fn",),
    "argument": ("arg",),
}
_DATA: Members = {"function": ("fn",), "state": ("state",)}

_STEPS = (None, "prepare", "disable-irq", "run", "exit")
"""``enum multi_stop_state``."""

_MAX_WORKS = 16
_STOP = "multi_cpu_stop"


def read_stop_machine(
    reader: Reader,
    percpu: PerCpu,
    name: Callable[[int], str | None],
    losses: LossLog,
) -> StopMachine | None:
    """Return the CPUs in stop_machine(); ``None`` if none is.

    ``since_ns`` is ``None``: the caller sets it.

    :param name: Returns the function at an address.
    """
    try:
        addresses = percpu.addresses("cpu_stopper")
        stoppers = read_structs(
            reader, "struct cpu_stopper", _STOPPER, addresses, losses
        )
        works = find_offset(find_type(reader.prog, "struct cpu_stopper"), ("works",))
    except MissingError:
        return None
    if works is None or not stoppers.has("first"):
        return None
    stopped, missing, data = [], [], 0
    for row, cpu in enumerate(percpu.cpus.tolist()):
        if not stoppers.readable[row]:
            continue
        runs = int(stoppers["function"][row]) if stoppers.has("function") else 0
        if runs and name(runs) == _STOP:
            stopped.append(cpu)
            continue
        head, first = int(addresses[row]) + works, int(stoppers["first"][row])
        if first not in (0, head):
            argument = _awaited(reader, head, first, name, losses)
            if argument:
                data = argument
                missing.append(cpu)
    if not stopped and not missing:
        return None
    function, step = _read_data(reader, data, name, losses)
    return StopMachine(
        function=function,
        step=step,
        stopped=tuple(stopped),
        missing=tuple(missing),
        since_ns=None,
    )


def _awaited(
    reader: Reader,
    head: int,
    first: int,
    name: Callable[[int], str | None],
    losses: LossLog,
) -> int:
    """Return the argument of ``multi_cpu_stop()`` if it is in a CPU's works; else 0."""
    node = first
    try:
        for _ in range(_MAX_WORKS):
            if node in (0, head):
                return 0
            work = read_struct(reader, "struct cpu_stop_work", _WORK, node)
            if name(work["function"]) == _STOP:
                return int(work["argument"])
            node = work["next"]
    except LOST as error:
        losses.lose(Loss.LISTS, f"cannot determine what stops CPUs: {error}")
    return 0


def _read_data(
    reader: Reader, address: int, name: Callable[[int], str | None], losses: LossLog
) -> tuple[str | None, str | None]:
    """Return the function that runs while CPUs are stopped, and their current step."""
    if not address:
        return None, None
    try:
        data = read_struct(reader, "struct multi_stop_data", _DATA, address)
    except MissingError:
        return None, None
    except UNREADABLE as error:
        losses.lose(Loss.VARIABLES, f"cannot determine what CPUs stop for: {error}")
        return None, None
    state = data["state"]
    step = _STEPS[state] if 0 <= state < len(_STEPS) else None
    return name(data["function"]), step
