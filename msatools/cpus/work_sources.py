# SPDX-License-Identifier: LGPL-2.1-or-later

"""
The function that makes work for a CPU, by what is queued there or runs now.

- A tasklet that schedules itself is in its CPU's list, or runs (kernel/softirq.c);
- a timer that starts itself is the first of its CPU to expire (kernel/time/hrtimer.c);
- a card that has packets is in the list of those to poll
  (:mod:`msatools.cpus.polls`);
- a function that other CPUs call is in the CPU's queue, or runs (kernel/smp.c), and so
  are works in an interrupt (kernel/irq_work.c) and wake-ups of tasks;
- a work item that queues itself is what a worker does, which runs without a pause
  (kernel/workqueue.c);
- callbacks of RCU are in its CPU's list (kernel/rcu/tree.c).
"""

from collections import Counter
from collections.abc import Sequence

import drgn
from drgn.helpers.linux.percpu import per_cpu

from msatools.cpus.polls import Poll, Polls
from msatools.cpus.stalls.calls import read_calls
from msatools.cpus.stalls.model import CrossCall
from msatools.errors import UNREADABLE
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.selfdesc.find import find_type, find_variable, object_at, offset_of
from msatools.target.addresses import KERNEL_HALF
from msatools.tasks.runningstacks import CpuStack, StackReader
from msatools.tasks.text import KernelText

MAX_SAMPLED = 256
"""Maximum number of callbacks of one CPU whose functions are looked at."""

_SOON_NS = 10_000_000
_PF_WQ_WORKER = 0x20

_TRIES = 64
"""Maximum number of times that a queue of a running kernel is looked at."""

_CALLERS = (
    *("__flush_smp_call_function_queue", "flush_smp_call_function_queue"),
    "csd_do_func",
)
_POLLERS = ("__napi_poll", "napi_poll")
_TASKLETS = ("tasklet_action_common", "tasklet_action")


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
        """Return the function of the first timer to expire, if it is a module's.

        The kernel's own serve many: who sleeps for a while is at no fault.
        """
        bases = self._variable("hrtimer_bases", cpu)
        kind = find_type(self._prog, "struct hrtimer")
        soonest: tuple[int, int] | None = None
        for base in bases.clock_base:
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
        if not int(task.flags) & _PF_WQ_WORKER:
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

        :param own: Prefix of the caller's own functions, which are not meant.
        """
        if cpu not in self._read:
            task = int(self._variable("runqueues", cpu).curr)
            self._read[cpu] = self._stacks.read(task)
        stack = self._read[cpu]
        if stack is None:
            return None
        names = [name.partition(".")[0] for name in stack.names]
        for caller in callers:
            if caller in names and (place := names.index(caller)):
                # Between two it is in a function of that file itself.
                is_own = names[place - 1].startswith(own)
                return None if is_own else stack.pcs[place - 1]
        return None


def call_text(call: CrossCall) -> str | None:
    """Return what is called, in words; ``None`` if that is unknown."""
    if call.kind == "wake-up":
        return "a wake-up" + ("" if call.pid is None else f" of {call.pid} {call.comm}")
    if call.function is None:
        return None
    return f"{call.function} (irq_work)" if call.kind == "irq-work" else call.function
