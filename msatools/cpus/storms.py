# SPDX-License-Identifier: LGPL-2.1-or-later

"""Who makes work for a CPU that no task of that name does."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import drgn
import numpy as np
from drgn.helpers.linux.percpu import per_cpu
from msgspec import Struct

from msatools.cpus.cross_calls import read_calls
from msatools.cpus.irqs import IrqTable, handler_names
from msatools.cpus.model import Cpu, CpusReport, CrossCall, RunQueue, Storm, Vector
from msatools.cpus.polls import PacketCounts, Poll, Polls
from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.clocks import read_jiffies
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import MAX_PLAUSIBLE, Reader
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import read_structs
from msatools.program.linear import KERNEL_HALF
from msatools.selfdesc.find import find_type, find_variable, object_at, offset_of
from msatools.tasks.running_stacks import ENTRIES, CpuStack, StackReader
from msatools.tasks.table import PF_WQ_WORKER
from msatools.tasks.text import KernelText
from msatools.tasks.waits import is_thunk

# --- The function that makes work for a CPU, by what is queued there or runs now.
#
# - A tasklet that schedules itself is in its CPU's list, or runs (kernel/softirq.c);
# - a timer that starts itself is the first of its CPU to expire
#   (kernel/time/hrtimer.c);
# - a card that has packets is in the list of those to poll (msatools.cpus.polls);
# - a function that other CPUs call is in the CPU's queue, or runs (kernel/smp.c), and
#   so are works in an interrupt (kernel/irq_work.c) and wake-ups of tasks;
# - a work item that queues itself is what a worker does, which runs without a pause
#   (kernel/workqueue.c);
# - callbacks of RCU are in its CPU's list (kernel/rcu/tree.c).


MAX_SAMPLED = 256
"""Maximum number of callbacks of one CPU whose functions are looked at."""

_SOON_NS = 10_000_000

_TRIES = 64
"""Maximum number of times that a queue of a running kernel is looked at."""

_CALLERS = (
    *("__flush_smp_call_function_queue", "flush_smp_call_function_queue"),
    "csd_do_func",
)
_POLLERS = ("__napi_poll", "napi_poll")
_TASKLETS = ("tasklet_action_common", "tasklet_action")
_BY_POINTER = (*_POLLERS, *_TASKLETS)
"""Callers that call by name only what helps them, such as wake_up_var()."""


class WorkSources:
    """Finds what is queued for a CPU, and what it runs."""

    def __init__(
        self, reader: Reader, percpu: PerCpu, text: KernelText, losses: LossLog
    ) -> None:
        self._reader = reader
        self._prog = reader.prog
        self._percpu = percpu
        self._text = text
        self._losses = losses
        self._stacks = StackReader(reader, text, losses)
        self._polls = Polls(reader, percpu, losses)
        self._read: dict[int, CpuStack | None] = {}

    def tasklet(self, cpu: int) -> int | None:
        """Return the function of the tasklet that is queued, or that runs."""
        for variable in ("tasklet_vec", "tasklet_hi_vec"):
            tasklet = self._variable(variable, cpu).head
            if tasklet:
                # "tasklet: Introduce new initialization API" (in v5.9)
                return int(tasklet.callback if tasklet.use_callback else tasklet.func)
        return self._called_by(cpu, _TASKLETS, "tasklet_")

    def timer(self, cpu: int) -> int | None:
        """Return the function of the timer that runs, or of the first to expire, if it
        is a module's.

        The kernel's own serve many: who sleeps for a while is at no fault.
        """
        bases = self._variable("hrtimer_bases", cpu)
        kind = find_type(self._prog, "struct hrtimer")
        soonest: tuple[int, int] | None = None
        for base in bases.clock_base:
            if base.running and not self._text.in_kernel(int(base.running.function)):
                return int(base.running.function)  # it is queued again when it ends
            node = base.active.rb_root.rb_leftmost
            if not node:
                continue
            place = int(node) - offset_of(kind, "node.node")
            timer = drgn.Object(self._prog, kind, address=place)
            expires = int(timer.node.expires) - int(base.offset)
            function = int(timer.function)
            is_own = self._text.in_kernel(function)
            if not is_own and (not soonest or expires < soonest[0]):
                soonest = expires, function
        if soonest is None or soonest[0] > int(bases.expires_next) + _SOON_NS:
            return None
        return soonest[1]

    def poll(self, cpu: int) -> Poll | None:
        """Return what a CPU polls for packets, or has polled last."""
        found = self._polls.of(cpu, int(self._variable("runqueues", cpu).curr))
        if found is not None:
            return found
        function = self._called_by(cpu, _POLLERS, "napi_")
        return None if function is None else Poll(function, None)

    def call(self, cpu: int) -> str | None:
        """Return what another CPU has this one do: a function, or a wake-up."""
        # On a running kernel the queue is empty most of the time.
        for _ in range(_TRIES if self._reader.is_live else 1):
            for call in read_calls(
                *(self._reader, self._percpu, (cpu,), {}, 0),
                *(self._named, self._losses),
                own_works=False,
            ):
                text = call_text(call)
                if text is not None:
                    return text
        function = self._called_by(cpu, _CALLERS, "flush_smp_")
        return self._named(function) if function else None

    def _named(self, address: int) -> str | None:
        """Return a function with its module; ``None`` if it is none."""
        return self._text.named(address) if self._text.name(address) else None

    def work(self, cpu: int) -> tuple[int, int, int]:
        """Return when a CPU's worker began and how long it ran, in ns, and the function
        of the work item that it executes; 0 if none."""
        task = self._variable("runqueues", cpu).curr
        ran_ns = int(task.se.sum_exec_runtime)
        return int(task.start_time), ran_ns, self._work_of(task)

    def _work_of(self, task: drgn.Object) -> int:
        if not int(task.flags) & PF_WQ_WORKER:
            return 0
        # "kthread: Generalize pf_io_worker so it can point to struct kthread" (v5.17)
        has_own = task.type_.type.has_member("worker_private")
        kthread = int(task.worker_private if has_own else task.set_child_tid)
        if kthread < KERNEL_HALF:
            return 0
        worker = int(object_at(self._prog, "struct kthread", kthread).data)
        if worker < KERNEL_HALF:
            return 0
        return int(object_at(self._prog, "struct worker", worker).current_func)

    def callbacks(self, data: int) -> Counter[int]:
        """Return the functions of the first callbacks of RCU in a CPU's list.

        :param data: Address of its ``struct rcu_data``.
        """
        own = object_at(self._prog, "struct rcu_data", data)
        heads = [own.cblist.head]
        # Those of CPUs without callbacks (rcu_nocbs=) wait in a second list at first.
        if own.type_.has_member("nocb_bypass"):
            heads.append(own.nocb_bypass.head)
        found: Counter[int] = Counter()
        for head in heads:
            node = int(head)
            for _ in range(MAX_SAMPLED):
                if node < KERNEL_HALF:
                    break
                try:
                    node, function = self._reader.words(node, 2).tolist()
                except UNREADABLE:
                    break  # what is found of the list is a sample anyway
                found[function] += 1
        return found

    def _variable(self, name: str, cpu: int) -> drgn.Object:
        return per_cpu(find_variable(self._prog, name), cpu)

    def _called_by(self, cpu: int, callers: Sequence[str], own: str) -> int | None:
        """Return where the function is that one of *callers* calls on a CPU.

        Unknown is whose return a thunk is, who was interrupted before its call, and
        whose last act is to queue itself: such a tail call leaves no frame of it.

        :param own: Prefix of the caller's own functions, which are not meant.
        """
        if cpu not in self._read:
            task = int(self._variable("runqueues", cpu).curr)
            self._read[cpu] = self._stacks.read(task)
        stack = self._read[cpu]
        if stack is None:
            return None
        names = [name.partition(".")[0] for name in stack.names]
        places = [names.index(caller) for caller in callers if caller in names]
        place = min(places, default=0)
        if not place:
            return None  # between two it is in the caller itself
        called = names[place - 1]
        is_own = called.lstrip("_").startswith(own) or called.startswith(ENTRIES)
        is_own = is_own or is_thunk(called)
        if names[place] in _BY_POINTER and self._stacks.called(stack.pcs[place]):
            is_own = True
        return None if is_own else stack.pcs[place - 1]


def call_text(call: CrossCall) -> str | None:
    """Return the function that a cross call runs, as text; ``None`` if unknown."""
    if call.kind == "wake-up":
        return "a wake-up" + ("" if call.pid is None else f" of {call.pid} {call.comm}")
    if call.function is None:
        return None
    return f"{call.function} (irq_work)" if call.kind == "irq-work" else call.function


# --- CPUs with far more interrupts, softirqs, calls or RCU callbacks than others.
#
# A CPU counts its interrupts, softirqs and calls, but not by function. If it has far
# more of them than others need, WorkSources, above, finds the function that is queued
# or runs there now. Callbacks of RCU are not counted as they are made, but as they wait
# (kernel/rcu/rcu_segcblist.c).


TASKLETS_A_SECOND = 5_000
"""Drivers have hundreds, of cards under full load thousands."""

CALLS_A_SECOND = 5_000
"""Interrupts of other CPUs that call functions; wake-ups are among them."""

POLLS_A_SECOND = 20_000
"""NET_RX softirqs; each polls a card for many packets."""

INTERRUPTS_A_SECOND = 20_000
"""Interrupts of one device on one CPU: fast disks have some 10,000."""

MANY_CALLBACKS = 10_000
"""Callbacks of RCU that wait on a CPU: from so many on RCU hurries (rcutree.qhimark).
"""

MANY_DROPS = 1_000
"""Packets that a CPU's backlog had no room for (net.core.netdev_max_backlog)."""

DROPPED_SHARE = 0.001
"""Minimum share of the packets that came to that CPU."""

WORKER_SHARE = 0.2
"""Minimum share of its life that a worker has run."""

LEAST_NS = 1_000_000_000
"""Shortest interval that rates are of, and shortest run of a worker."""

UNKNOWN = "an unknown function"
"""Stands for the function of what is neither queued nor running now."""

_NAMED_OR_NOT = ("tasklet", "softirq")
"""Kinds that are a storm by their number, whoever makes it."""

_LEAST_FUNCTION_SHARE = 0.5
"""Minimum share of the callbacks looked at that one function has to have."""

_WORKERS = "kworker/"

_Row = tuple[str, Mapping[int, int], float, Callable[[int], "_Source | None"]]
"""A kind of storms: its name, counts by CPU, how many a second are one, and what finds
its source on a CPU."""


class _Source(Struct, frozen=True):
    """What makes the work."""

    function: str
    device: str | None = None


class Storms:
    """Finds what makes much work for some CPUs. Reads nothing of the other CPUs."""

    def __init__(
        self, reader: Reader, percpu: PerCpu, text: KernelText, losses: LossLog
    ) -> None:
        self._reader = reader
        self._percpu = percpu
        self._losses = losses
        self._text = text
        self._sources = WorkSources(reader, percpu, text, losses)
        self._polls = Polls(reader, percpu, losses)

    def find(
        self,
        report: CpusReport,
        interrupts: IrqTable,
        packets: Mapping[int, PacketCounts],
        span_ns: int,
        now_ns: int,
    ) -> tuple[Storm, ...]:
        """Return the storms of all CPUs.

        :param report: Has the run queues and the counts of all CPUs.
        :param packets: The packets of each CPU, of the same time.
        :param span_ns: The time in which softirqs, interrupts and packets were counted.
        :param now_ns: CLOCK_MONOTONIC.
        """
        found = [
            *self._callbacks(),
            *self._works(report.run_queues, now_ns),
            *self._drops(packets),
        ]
        if span_ns >= LEAST_NS:
            found += self._counted(report, interrupts, span_ns)
        return tuple(found)

    def _counted(
        self, report: CpusReport, interrupts: IrqTable, span_ns: int
    ) -> Iterator[Storm]:
        """Yield the storms by what CPUs count."""
        sources, softirqs = self._sources, report.softirqs
        tasklets = _counts(softirqs, "TASKLET", "HI")
        timers = self._unusual_timers(report, span_ns)
        polls = _counts(softirqs, "NET_RX")
        calls = {cpu.cpu: cpu.xcal or 0 for cpu in report.cpus if cpu.online}
        tasklet, timer = self._named(sources.tasklet), self._named(sources.timer)
        rows: tuple[_Row, ...] = (
            ("tasklet", tasklets, TASKLETS_A_SECOND, tasklet),
            ("timer", timers, 0, timer),
            ("softirq", polls, POLLS_A_SECOND, self._poll),
            ("call", calls, CALLS_A_SECOND, self._call),
        )
        for row in rows:
            yield from self._of_rates(*row, span_ns)
        yield from self._interrupts(interrupts, span_ns)

    def _unusual_timers(self, report: CpusReport, span_ns: int) -> Mapping[int, int]:
        """Return the timer interrupts of CPUs that have more than they need.

        A busy CPU has one a tick, an idle one hardly any; as many again as there are
        ticks are usual of either.
        """
        try:
            tick_ns = read_jiffies(self._reader.prog).tick_ns
        except (MissingError, *UNREADABLE):
            return {}
        counts = _counts(report.vectors, "LOC")
        return {
            cpu.cpu: counts[cpu.cpu]
            for cpu in report.cpus
            if counts.get(cpu.cpu, 0) * tick_ns >= (1 + _busy_share(cpu)) * span_ns
        }

    def _of_rates(
        self,
        kind: str,
        counts: Mapping[int, int],
        limit: float,
        source_on: Callable[[int], _Source | None],
        span_ns: int,
    ) -> Iterator[Storm]:
        for cpu, count in counts.items():
            per_second = count * 1e9 / span_ns
            if per_second < limit:
                continue
            try:
                source = source_on(cpu)
            except MissingError:
                continue
            except UNREADABLE as error:
                self._losses.lose(
                    Loss.CPUS, f"cannot determine what CPU {cpu} serves: {error}"
                )
                continue
            if source is None and kind in _NAMED_OR_NOT:
                source = _Source(UNKNOWN)
            if source is not None:
                yield Storm(
                    kind=kind,
                    cpu=cpu,
                    function=source.function,
                    per_second=per_second,
                    device=source.device,
                )

    def _named(
        self, function_on: Callable[[int], int | None]
    ) -> Callable[[int], _Source | None]:
        """Return what finds a source, of what finds the address of its function."""

        def source_on(cpu: int) -> _Source | None:
            function = function_on(cpu)
            return _Source(self._text.named(function)) if function else None

        return source_on

    def _call(self, cpu: int) -> _Source | None:
        text = self._sources.call(cpu)
        return None if text is None else _Source(text)

    def _poll(self, cpu: int) -> _Source | None:
        poll = self._sources.poll(cpu)
        return None if poll is None else self._source(poll)

    def _source(self, poll: Poll) -> _Source:
        return _Source(self._text.named(poll.function), poll.device)

    def _drops(self, packets: Mapping[int, PacketCounts]) -> Iterator[Storm]:
        """Yield CPUs whose backlog had no room for many packets.

        They are not counted by device.
        """
        for cpu, count in packets.items():
            came = count.processed + count.dropped
            if count.dropped < MANY_DROPS or count.dropped < DROPPED_SHARE * came:
                continue
            try:
                source = self._source(self._polls.backlog(cpu))
            except MissingError:
                return
            except UNREADABLE as error:
                text = f"cannot read the backlog of CPU {cpu}: {error}"
                self._losses.lose(Loss.CPUS, text)
                continue
            yield Storm(
                kind="drop",
                cpu=cpu,
                function=source.function,
                share=count.dropped / came,
                waiting=count.dropped,
                device=source.device,
            )

    def _interrupts(self, table: IrqTable, span_ns: int) -> Iterator[Storm]:
        """Yield interrupts of devices that come often, with their handlers."""
        rates = table.counts * (1e9 / span_ns)
        often = (rates >= INTERRUPTS_A_SECOND) & table.device[:, None]
        for row, column in zip(
            *(each.tolist() for each in often.nonzero()), strict=True
        ):
            names = handler_names(table, row, self._text)
            if names:
                yield Storm(
                    kind="interrupt",
                    cpu=int(table.cpus[column]),
                    function=", ".join(names),
                    per_second=float(rates[row, column]),
                    irq=int(table.irq[row]),
                )

    def _callbacks(self) -> Iterator[Storm]:
        """Yield CPUs with many callbacks of RCU, most of one function."""
        members = {"length": ("cblist.len",)}
        try:
            addresses = self._percpu.addresses("rcu_data")
            data = read_structs(
                self._reader, "struct rcu_data", members, addresses, self._losses
            )
        except MissingError:
            return
        if not data.has("length"):
            return
        lengths = data["length"].astype(np.int64)
        many = (
            (lengths >= MANY_CALLBACKS)
            & (lengths < MAX_PLAUSIBLE >> 20)
            & data.readable
        )
        for row in many.nonzero()[0].tolist():
            cpu = int(self._percpu.cpus[row])
            try:
                functions = self._sources.callbacks(int(addresses[row]))
            except MissingError:
                return
            except UNREADABLE as error:
                self._losses.lose(Loss.CPUS, f"cannot read RCU's callbacks: {error}")
                continue
            if not functions:
                continue
            function, count = functions.most_common(1)[0]
            share = count / functions.total()
            if share >= _LEAST_FUNCTION_SHARE:
                yield Storm(
                    kind="callback",
                    cpu=cpu,
                    function=self._text.named(function),
                    share=share,
                    waiting=int(lengths[row]),
                )

    def _works(self, queues: tuple[RunQueue, ...], now_ns: int) -> Iterator[Storm]:
        for queue in queues:
            if queue.current is None or not queue.current.comm.startswith(_WORKERS):
                continue
            try:
                started_ns, ran_ns, function = self._sources.work(queue.cpu)
            except MissingError:
                continue
            except UNREADABLE as error:
                text = f"cannot read the work of CPU {queue.cpu}: {error}"
                self._losses.lose(Loss.CPUS, text)
                continue
            life_ns = now_ns - started_ns
            is_sane = 0 < ran_ns <= life_ns
            if function and is_sane and ran_ns >= max(LEAST_NS, WORKER_SHARE * life_ns):
                yield Storm(
                    kind="work",
                    cpu=queue.cpu,
                    function=self._text.named(function),
                    share=ran_ns / life_ns,
                )


def _busy_share(cpu: Cpu) -> float:
    """Return the share of its time in which a CPU had something to do; 1 if unknown."""
    times = (cpu.usr_ns, cpu.sys_ns, cpu.irq_ns, cpu.st_ns, cpu.wt_ns, cpu.idl_ns)
    total = sum(each or 0 for each in times)
    return 1 - ((cpu.wt_ns or 0) + (cpu.idl_ns or 0)) / total if total else 1


def _counts(rows: tuple[Vector, ...] | None, *names: str) -> Mapping[int, int]:
    """Return how often some vectors were served, by CPU."""
    found: Counter[int] = Counter()
    for row in rows or ():
        if row.name in names:
            found.update(row.counts)
    return found
