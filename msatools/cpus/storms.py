# SPDX-License-Identifier: LGPL-2.1-or-later

"""CPUs with far more interrupts, softirqs, calls, work items or RCU callbacks than they
need, and the functions that cause them. The report calls each a storm."""

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

# --- The function that makes work for a CPU: it is queued there, or runs now.
#
# - A tasklet that schedules itself is in its CPU's list, or runs (kernel/softirq.c);
# - a timer that restarts itself is the first of its CPU to expire
#   (kernel/time/hrtimer.c);
# - a network card that has packets is in the CPU's poll list (msatools.cpus.polls);
# - a function that other CPUs call is in the CPU's queue, or runs (kernel/smp.c), and
#   so are works in an interrupt (kernel/irq_work.c) and wake-ups of tasks;
# - a work item that queues itself is the current one of a worker that never pauses
#   (kernel/workqueue.c);
# - callbacks of RCU are in the CPU's list (kernel/rcu/tree.c).


MAX_SAMPLED = 256
"""Maximum number of callbacks in one list of a CPU whose functions are read."""

_SOON_NS = 10_000_000
"""Maximum time from a CPU's next timer interrupt to the expiry that causes it."""

_TRIES = 64
"""Maximum number of times that a call queue of a running kernel is read."""

_CALLERS = (
    *("__flush_smp_call_function_queue", "flush_smp_call_function_queue"),
    "csd_do_func",
)
_POLLERS = ("__napi_poll", "napi_poll")
_TASKLETS = ("tasklet_action_common", "tasklet_action")
_BY_POINTER = (*_POLLERS, *_TASKLETS)
"""Callers that call the wanted function by pointer: a function that they call by name
is a helper, such as wake_up_var()."""


class WorkSources:
    """Finds the function that makes work for a CPU: it is queued or runs there."""

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
        """Return the address of the function of the tasklet that is queued or runs;
        ``None`` if none is found."""
        for variable in ("tasklet_vec", "tasklet_hi_vec"):
            tasklet = self._variable(variable, cpu).head
            if tasklet:
                # "tasklet: Introduce new initialization API" (in v5.9)
                return int(tasklet.callback if tasklet.use_callback else tasklet.func)
        return self._called_by(cpu, _TASKLETS, "tasklet_")

    def timer(self, cpu: int) -> int | None:
        """Return the address of the function of the timer that runs, or of the next.

        Only a module's function counts, else ``None``: the kernel's serve any sleep.
        """
        bases = self._variable("hrtimer_bases", cpu)
        kind = find_type(self._prog, "struct hrtimer")
        soonest: tuple[int, int] | None = None
        for base in bases.clock_base:
            if base.running and not self._text.in_kernel(int(base.running.function)):
                return int(base.running.function)  # it may restart when it ends
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
        """Return the poll of a network device that a CPU does next, or did last."""
        found = self._polls.of(cpu, int(self._variable("runqueues", cpu).curr))
        if found is not None:
            return found
        function = self._called_by(cpu, _POLLERS, "napi_")
        return None if function is None else Poll(function, None)

    def call(self, cpu: int) -> str | None:
        """Return what another CPU asked this one to do, as text: a function, with its
        module, or a wake-up."""
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
        """Return a function's name with its module; ``None`` if none is there."""
        return self._text.named(address) if self._text.name(address) else None

    def work(self, cpu: int) -> tuple[int, int, int]:
        """Return of the task that a CPU runs: its start time (CLOCK_MONOTONIC, ns), its
        CPU time (ns), and the function of the work item that it executes; 0 if none."""
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
        """Count the functions of the first RCU callbacks in a CPU's lists, by address.

        :param data: Address of the CPU's ``struct rcu_data``.
        """
        own = object_at(self._prog, "struct rcu_data", data)
        heads = [own.cblist.head]
        # With rcu_nocbs= a CPU's callbacks wait in a second list at first.
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
                    break  # the part of the list that was read is a sample, too
                found[function] += 1
        return found

    def _variable(self, name: str, cpu: int) -> drgn.Object:
        return per_cpu(find_variable(self._prog, name), cpu)

    def _called_by(self, cpu: int, callers: Sequence[str], own: str) -> int | None:
        """Return an address in the function that one of *callers* calls on a CPU's
        stack in a dump.

        ``None`` if the stack does not show it: no caller is on it, the caller was
        interrupted outside of the call, the function is just returning by a thunk, or
        it ended in a tail call (to queue itself), which leaves no frame.

        :param own: Prefix of the callers' helpers, which are not the function.
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
            return None  # the caller itself runs, between two calls
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
# or runs there now. RCU has no count of the callbacks that were queued, but of those
# that wait now (kernel/rcu/rcu_segcblist.c).


TASKLETS_A_SECOND = 5_000
"""Minimum rate of tasklets of a storm: drivers cause hundreds, those of cards under
full load thousands."""

CALLS_A_SECOND = 5_000
"""Minimum rate of a storm of interrupts for calls by other CPUs, wake-ups included."""

POLLS_A_SECOND = 20_000
"""Minimum rate of a storm of NET_RX softirqs; each polls a card for many packets."""

INTERRUPTS_A_SECOND = 20_000
"""Minimum rate of a storm of one device's interrupts on one CPU: fast disks have some
10,000."""

MANY_CALLBACKS = 10_000
"""Minimum number of RCU callbacks that wait on a CPU: from there on RCU hurries
(rcutree.qhimark)."""

MANY_DROPS = 1_000
"""Minimum number of dropped packets, for which a CPU's backlog had no room
(net.core.netdev_max_backlog)."""

DROPPED_SHARE = 0.001
"""Minimum share of dropped packets among all that came to the CPU."""

WORKER_SHARE = 0.2
"""Minimum share of its life that a worker has run."""

LEAST_NS = 1_000_000_000
"""Shortest interval for which rates are computed, and shortest CPU time of a worker."""

UNKNOWN = "an unknown function"
"""Stands for a function that is neither queued nor running now."""

_NAMED_OR_NOT = ("tasklet", "softirq")
"""Kinds that are reported even if their function is unknown."""

_LEAST_FUNCTION_SHARE = 0.5
"""Minimum share of the sampled callbacks that must be of one function."""

_WORKERS = "kworker/"

_Row = tuple[str, Mapping[int, int], float, Callable[[int], "_Source | None"]]
"""A kind of storms: its name, counts by CPU, minimum rate a second, and a function that
returns the source on a CPU."""


class _Source(Struct, frozen=True):
    """The function that makes the work, and the network device it polls, if any."""

    function: str
    device: str | None = None


class Storms:
    """Finds CPUs with far too much work of a kind, and what makes it."""

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
        :param packets: The packets by CPU, counted in the same time.
        :param span_ns: The time in which softirqs, interrupts and packets were counted.
        :param now_ns: CLOCK_MONOTONIC now.
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
        """Yield the storms of the kinds that CPUs count."""
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
        """Return the timer interrupts by CPU, of CPUs that have more than they need.

        A busy CPU has one a tick, an idle one hardly any. Up to one more a tick is
        usual.
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
        """Return a finder of the source on a CPU, made from one of the address of its
        function."""

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
        """Yield the storms of packets for which a CPU's backlog had no room.

        The kernel does not count dropped packets by device.
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
        """Yield the storms of devices' interrupts, with their handlers."""
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
        """Yield the storms of RCU callbacks on a CPU, most of one function."""
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
    """Return the sum of the counts of the named vectors, by CPU."""
    found: Counter[int] = Counter()
    for row in rows or ():
        if row.name in names:
            found.update(row.counts)
    return found
