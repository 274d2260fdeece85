# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Who makes work for a CPU that no task of that name does: tasklets, timers and works.

A CPU counts its softirqs and timer interrupts, but not by function. If it has far more
of them than others need, what is queued there now tells which function it is:

- a tasklet that schedules itself is in its CPU's list, or runs (kernel/softirq.c);
- a timer that starts itself is the first of its CPU to expire (kernel/time/hrtimer.c);
- a work item that queues itself is what a worker does, which runs without a pause
  (kernel/workqueue.c).
"""

from collections.abc import Callable, Iterator, Mapping

import drgn
from drgn.helpers.linux.percpu import per_cpu

from msatools.cpus.model import RunQueue, Storm, Vector
from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.jiffies import read_jiffies
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.selfdesc.find import find_type, find_variable, object_at
from msatools.target.addresses import KERNEL_HALF
from msatools.tasks.runningstacks import StackReader
from msatools.tasks.text import KernelText

TASKLETS_A_SECOND = 5_000
"""Drivers have hundreds, of cards under full load thousands."""

TICKS = 2
"""Minimum ratio of timer interrupts to ticks: a busy CPU has one of each."""

SHARE = 0.2
"""Minimum share of its life that a worker has run."""

LEAST_NS = 1_000_000_000
"""Minimum time that this is of."""

UNKNOWN = "an unknown one"
"""Stands for the function of a tasklet that is neither queued nor running now."""

_SOON_NS = 10_000_000
_PF_WQ_WORKER = 0x20
_WORKERS = "kworker/"


class Storms:
    """Finds what makes much work for some CPUs. Reads nothing of the other CPUs."""

    def __init__(self, reader: Reader, text: KernelText, losses: LossLog) -> None:
        self._reader = reader
        self._prog = reader.prog
        self._losses = losses
        self._text = text
        self._stacks = StackReader(reader, self._text, losses)

    def find(
        self,
        queues: tuple[RunQueue, ...],
        softirqs: tuple[Vector, ...] | None,
        vectors: tuple[Vector, ...] | None,
        span_ns: int,
        now_ns: int,
    ) -> tuple[Storm, ...]:
        """Return the storms of all CPUs.

        :param span_ns: The time in which softirqs and interrupts were counted.
        :param now_ns: CLOCK_MONOTONIC.
        """
        if span_ns < LEAST_NS:
            return ()
        return (
            *self._of_rates("tasklet", softirqs, "TASKLET", span_ns, self._tasklet),
            *self._of_rates("timer", vectors, "LOC", span_ns, self._timer),
            *self._works(queues, now_ns),
        )

    def _of_rates(
        self,
        kind: str,
        rows: tuple[Vector, ...] | None,
        name: str,
        span_ns: int,
        function_at: Callable[[int], int | None],
    ) -> Iterator[Storm]:
        counts = _counts(rows, name)
        limit = float(TASKLETS_A_SECOND)
        if kind == "timer" and counts:
            try:
                limit = TICKS * 1e9 / read_jiffies(self._prog).tick_ns
            except (MissingError, *UNREADABLE):
                return
        for cpu, count in counts.items():
            per_second = count * 1e9 / span_ns
            if per_second < limit:
                continue
            try:
                function = function_at(cpu)
            except MissingError:
                continue
            except UNREADABLE as error:
                self._losses.lose(
                    Loss.CPUS, f"cannot tell what CPU {cpu} serves: {error}"
                )
                continue
            if function or kind == "tasklet":
                yield Storm(
                    kind=kind,
                    cpu=cpu,
                    function=self._text.named(function) if function else UNKNOWN,
                    per_second=per_second,
                )

    def _tasklet(self, cpu: int) -> int | None:
        """Return the function of the tasklet that is queued, or that runs."""
        for variable in ("tasklet_vec", "tasklet_hi_vec"):
            tasklet = per_cpu(find_variable(self._prog, variable), cpu).head
            if tasklet:
                # "tasklet: Introduce new initialization API" (in v5.9)
                return int(tasklet.callback if tasklet.use_callback else tasklet.func)
        queue = per_cpu(find_variable(self._prog, "runqueues"), cpu)
        stack = self._stacks.read(int(queue.curr))
        if stack is None:
            return None
        names = [name.partition(".")[0] for name in stack.names]
        for caller in ("tasklet_action_common", "tasklet_action"):
            if caller in names and (place := names.index(caller)):
                # Between two tasklets it is in a function of softirq.c itself.
                is_own = names[place - 1].startswith("tasklet_")
                return None if is_own else stack.pcs[place - 1]
        return None

    def _timer(self, cpu: int) -> int | None:
        """Return the function of the first timer to expire, if it is a module's.

        The kernel's own serve many: who sleeps for a while is at no fault.
        """
        bases = per_cpu(find_variable(self._prog, "hrtimer_bases"), cpu)
        soonest: tuple[int, int] | None = None
        for base in bases.clock_base:
            node = base.active.rb_root.rb_leftmost
            if not node:
                continue
            timer = _container(self._prog, int(node))
            expires = int(timer.node.expires) - int(base.offset)
            function = int(timer.function)
            is_own = self._text.in_kernel(function)
            if not is_own and (not soonest or expires < soonest[0]):
                soonest = expires, function
        if soonest is None or soonest[0] > int(bases.expires_next) + _SOON_NS:
            return None
        return soonest[1]

    def _works(self, queues: tuple[RunQueue, ...], now_ns: int) -> Iterator[Storm]:
        for queue in queues:
            if queue.current is None or not queue.current.comm.startswith(_WORKERS):
                continue
            try:
                runqueues = find_variable(self._prog, "runqueues")
                task = per_cpu(runqueues, queue.cpu).curr
                life_ns = now_ns - int(task.start_time)
                ran_ns = int(task.se.sum_exec_runtime)
                if ran_ns < max(LEAST_NS, SHARE * life_ns):
                    continue
                function = _work_of(self._prog, task)
            except (MissingError, *UNREADABLE):
                continue  # the CPU's task is in the report all the same
            if function:
                yield Storm(
                    kind="work",
                    cpu=queue.cpu,
                    function=self._text.named(function),
                    share=min(ran_ns / life_ns, 1.0),
                )


def _counts(rows: tuple[Vector, ...] | None, name: str) -> Mapping[int, int]:
    return next((row.counts for row in rows or () if row.name == name), {})


def _container(prog: drgn.Program, node: int) -> drgn.Object:
    """Return the ``struct hrtimer`` of a node in the tree of its clock."""
    kind = find_type(prog, "struct hrtimer")
    return drgn.Object(prog, kind, address=node - drgn.offsetof(kind, "node.node"))


def _work_of(prog: drgn.Program, task: drgn.Object) -> int:
    """Return the function of the work item that a worker executes; 0 if none."""
    if not int(task.flags) & _PF_WQ_WORKER:
        return 0
    # "kthread: Generalize pf_io_worker so it can point to struct kthread" (in v5.17)
    has_own = task.type_.type.has_member("worker_private")
    kthread = int(task.worker_private if has_own else task.set_child_tid)
    if kthread < KERNEL_HALF:
        return 0
    worker = int(object_at(prog, "struct kthread", kthread).data)
    if worker < KERNEL_HALF:
        return 0
    return int(object_at(prog, "struct worker", worker).current_func)
