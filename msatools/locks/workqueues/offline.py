# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds delayed work whose timer is on an offline CPU, where it never fires.

kernel/time/timer.c: the timers of a CPU that goes offline move to another one, but
queue_delayed_work_on() may add one later.
"""

from collections.abc import Iterator

import drgn
import numpy as np
from msgspec import Struct

from msatools.errors import UNREADABLE
from msatools.kernel.cpumask import online_cpus
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import read_percpu
from msatools.kernel.report import LossLog
from msatools.kernel.words import unsigned
from msatools.locks.base.struct_reader import Layout
from msatools.selfdesc.find import find_variable
from msatools.target.addresses import KERNEL_HALF

_MAX_TIMERS = 1 << 12
"""Maximum number of timers of one offline CPU: there are hardly any."""


class DelayedWork(Struct, frozen=True):
    """A ``struct delayed_work`` whose timer is pending."""

    cpu: int
    work: int
    """Address of its work item."""

    function: int
    queue: int
    expires: int
    """Jiffies at which its timer is to fire."""


def read_offline_work(layout: Layout, losses: LossLog) -> list[DelayedWork]:
    """Return the delayed work of offline CPUs.

    :raises MissingError: if the types or variables are unknown
    """
    reader = layout.reader
    percpu = read_percpu(reader, losses)
    online = frozenset(online_cpus(reader, losses))
    if not online or online.issuperset(percpu.cpus.tolist()):
        return []
    variable = find_variable(reader.prog, "timer_bases")
    size = layout.size("timer_base")
    # An array with one base or more for each CPU.
    count = max(1, drgn.sizeof(variable.type_) // size)
    found: list[DelayedWork] = []
    starts = percpu.addresses("timer_bases").tolist()
    for cpu, start in zip(percpu.cpus.tolist(), starts, strict=True):
        if cpu in online:
            continue
        for base in range(start, start + count * size, size):
            try:
                found += _of_base(layout, cpu, base)
            except UNREADABLE as error:
                losses.lose(
                    Loss.WORKQUEUES, f"cannot read timers of CPU {cpu}: {error}"
                )
    return found


def _of_base(layout: Layout, cpu: int, base: int) -> Iterator[DelayedWork]:
    function = layout.symbol("delayed_work_timer_fn")
    start = layout.offset("timer_base", "vectors")
    heads = layout.reader.words(base + start, (layout.size("timer_base") - start) // 8)
    left = _MAX_TIMERS
    for timer in heads[heads >= np.uint64(KERNEL_HALF)].tolist():
        while timer >= KERNEL_HALF and left:
            left -= 1
            called, expires, following = layout.members(
                timer, "timer_list", "function", "expires", "entry.next"
            )
            if called == function:
                yield _delayed(layout, cpu, timer, expires)
            timer = following


def _delayed(layout: Layout, cpu: int, timer: int, expires: int) -> DelayedWork:
    start = timer - layout.offset("delayed_work", "timer")
    size = layout.size("delayed_work")
    data = layout.reader.read(start, size)
    return DelayedWork(
        cpu=cpu,
        work=start + layout.offset("delayed_work", "work"),
        function=unsigned(data, layout.offset("delayed_work", "work.func"), 8),
        queue=unsigned(data, layout.offset("delayed_work", "wq"), 8),
        expires=expires,
    )
