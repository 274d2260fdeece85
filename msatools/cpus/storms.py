# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Who makes work for a CPU that no task of that name does.

A CPU counts its interrupts, softirqs and calls, but not by function. If it has far more
of them than others need, :mod:`msatools.cpus.work_sources` finds the function that is
queued or runs there now. Callbacks of RCU are not counted as they are made, but as they
wait (kernel/rcu/rcu_segcblist.c).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from msgspec import Struct

from msatools.cpus.irqs import IrqTable, handler_names
from msatools.cpus.model import Cpu, CpusReport, RunQueue, Storm, Vector
from msatools.cpus.polls import Poll, Polls
from msatools.cpus.work_sources import WorkSources
from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.jiffies import read_jiffies
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import read_structs
from msatools.kernel.words import MAX_PLAUSIBLE
from msatools.tasks.text import KernelText

TASKLETS_A_SECOND = 5_000
"""Drivers have hundreds, of cards under full load thousands."""

CALLS_A_SECOND = 5_000
"""Interrupts of other CPUs that call functions; wake-ups are among them."""

POLLS_A_SECOND = 20_000
"""NET_RX softirqs; each polls a card for many packets."""

INTERRUPTS_A_SECOND = 20_000
"""Interrupts of one device on one CPU: fast disks have some 10,000."""

CALLBACKS = 10_000
"""Callbacks of RCU that wait on a CPU: from so many on RCU hurries (rcutree.qhimark).
"""

DROPS = 1_000
"""Packets that a CPU's backlog had no room for (net.core.netdev_max_backlog)."""

DROPPED_SHARE = 0.001
"""Minimum share of the packets that came to that CPU."""

SHARE = 0.2
"""Minimum share of its life that a worker has run."""

LEAST_NS = 1_000_000_000
"""Minimum time that this is of."""

UNKNOWN = "an unknown function"
"""Stands for the function of what is neither queued nor running now."""

_NAMED_OR_NOT = ("tasklet", "softirq")
"""Kinds that are a storm by their number, whoever makes it."""

_MOST_SHARE = 0.5
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
        self, report: CpusReport, interrupts: IrqTable, span_ns: int, now_ns: int
    ) -> tuple[Storm, ...]:
        """Return the storms of all CPUs.

        :param report: Has the run queues and the counts of all CPUs.
        :param span_ns: The time in which softirqs and interrupts were counted.
        :param now_ns: CLOCK_MONOTONIC.
        """
        found = [
            *self._callbacks(),
            *self._works(report.run_queues, now_ns),
            *self._drops(),
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

    def _drops(self) -> Iterator[Storm]:
        """Yield CPUs whose backlog had no room for many packets."""
        for cpu, count in self._polls.counts().items():
            came = count.processed + count.dropped
            if count.dropped < DROPS or count.dropped < DROPPED_SHARE * came:
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
        many = (lengths >= CALLBACKS) & (lengths < MAX_PLAUSIBLE >> 20) & data.readable
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
            if share >= _MOST_SHARE:
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
            if function and is_sane and ran_ns >= max(LEAST_NS, SHARE * life_ns):
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
