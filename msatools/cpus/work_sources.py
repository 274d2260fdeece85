# SPDX-License-Identifier: LGPL-2.1-or-later

"""
The function that makes work for a CPU, by what is queued there or runs now.

- A tasklet that schedules itself is in its CPU's list, or runs (kernel/softirq.c);
- a timer that starts itself is the first of its CPU to expire (kernel/time/hrtimer.c);
- a card that has packets is in the list of those to poll (net/core/dev.c);
- a function that other CPUs call is in the CPU's queue, or runs (kernel/smp.c);
- a work item that queues itself is what a worker does, which runs without a pause
  (kernel/workqueue.c);
- callbacks of RCU are in its CPU's list (kernel/rcu/tree.c).
"""

from collections import Counter
from collections.abc import Sequence

import drgn
from drgn.helpers.linux.percpu import per_cpu

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

_TYPE_MASK = 0xF0
"""CSD_FLAG_TYPE_MASK (include/linux/smp_types.h)."""

_CALL_TYPES = (0x00, 0x10)
"""CSD_TYPE_ASYNC, CSD_TYPE_SYNC: others are of irq_work and of wake-ups."""

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
        self._stacks = StackReader(reader, text, losses)
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

    def poll(self, cpu: int) -> int | None:
        """Return the function that polls the first card in the list, or that runs."""
        first = int(self._variable("softnet_data", cpu).poll_list.next)
        head = int(self._variable("softnet_data", cpu).poll_list.address_of_())
        if first >= KERNEL_HALF and first != head:
            kind = find_type(self._prog, "struct napi_struct")
            place = first - offset_of(kind, "poll_list")
            return int(drgn.Object(self._prog, kind, address=place).poll)
        return self._called_by(cpu, _POLLERS, "napi_")

    def call(self, cpu: int) -> int | None:
        """Return the function that another CPU has this one call."""
        row = self._percpu.cpus.tolist().index(cpu)
        head = int(self._percpu.addresses("call_single_queue")[row])
        # On a running kernel the queue is empty most of the time.
        for _ in range(_TRIES if self._reader.is_live else 1):
            call = int(self._reader.words(head, 1)[0])
            function = self._function(call) if call >= KERNEL_HALF else 0
            if function and self._text.name(function):
                return function
        return self._called_by(cpu, _CALLERS, "flush_smp_")

    def _function(self, call: int) -> int:
        """Return the function of a ``call_single_data_t``; 0 of other entries."""
        queued = object_at(self._prog, "struct __call_single_data", call)
        # "smp, irq_work: Continue smp_call_function*() and irq_work*() integration"
        # (in v5.9)
        has_node = queued.type_.has_member("node")
        flags = int(queued.node.u_flags if has_node else queued.flags)
        return int(queued.func) if flags & _TYPE_MASK in _CALL_TYPES else 0

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
