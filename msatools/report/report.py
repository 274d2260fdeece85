# SPDX-License-Identifier: LGPL-2.1-or-later

"""Collect msa-report's data: read all parts of a kernel once, and apply the rules."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import drgn
import numpy as np
from msgspec.structs import replace

from msatools.cpus.cpus import CpusOptions, collect_cpus
from msatools.errors import LOST, MissingError, OwnFault, fault_of
from msatools.kernel.clocks import read_clocks
from msatools.kernel.report import (
    KernelSession,
    Loss,
    LossLog,
    Progress,
    Report,
    quietly,
)
from msatools.kernel.slab import reclaimable_caches
from msatools.locks.locks import collect_locks
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport
from msatools.program.description import OPENED_TEXT, LogRecord, describe
from msatools.program.model import MovedError, Target, TargetError
from msatools.prstat.model import StackGroup
from msatools.prstat.prstat import collect_prstat
from msatools.prstat.recorded import RecordedPrstat, choose
from msatools.prstat.select import Options
from msatools.report.crash import (
    LOG_ALONE,
    UNKNOWN,
    CrashLog,
    choose_boot,
    find_crash,
    machine_of_log,
    note_log,
    read_machine,
    target_of_log,
)
from msatools.report.log import last_lines, parse_events, read_log
from msatools.report.memory import parse_ooms, read_memory
from msatools.report.model import (
    SECTIONS,
    ReportOptions,
    ReportSection,
    TriageReport,
    TriageVerdict,
)
from msatools.report.rule import (
    ReportParts,
    VerdictRule,
    count_text,
    judge,
    slab_groups,
    untested,
    worst_first,
)
from msatools.report.rules import LOG_RULES, RULES
from msatools.report.rules.crash import device_errors
from msatools.report.summaries import next_steps, section
from msatools.reports.units import duration
from msatools.tasks.identity import address_spaces
from msatools.tasks.table import TaskReader, tasks_read_once
from msatools.zombies.limits import collect_limits
from msatools.zombies.model import Limit
from msatools.zombies.zombies import collect_zombies

if TYPE_CHECKING:
    from msatools.program.log_text import LogText

T = TypeVar("T")
U = TypeVar("U")

_COVERAGE = ("parts", "parts_lost", "reads", "bytes_read")
"""Keys that are always in the report's coverage."""

_STEPS = 9


def collect_report(
    prog: drgn.Program,
    *,
    target: Target | None = None,
    options: ReportOptions | None = None,
    progress: Progress | None = None,
) -> TriageReport:
    """
    Report what happened to a kernel, and what is wrong with it.

    >>> report = collect_report(prog)
    >>> report.crash.cause, report.crash.function
    ('null-dereference', 'cm_read_state')
    >>> [verdict.code for verdict in report.verdicts]
    ['panic']

    Nothing is written, and nothing but *prog* is read.

    :param prog: A Linux kernel with types, live or dead.
    :param target: Description of the target; read from *prog* if not given.
    :param progress: Called with the steps done and the number of steps.
    :raises TargetError: if the program is not a kernel, or has no types
    """
    session = Triage(prog, target or describe(prog), options or ReportOptions())
    return session.report(progress or quietly)


class Triage(KernelSession[TriageReport, ReportOptions]):
    """A series of reports: see :class:`msatools.kernel.report.Session`."""

    def report(self, progress: Progress) -> TriageReport:
        """Report what happened until now, and what is wrong now."""
        self._faults: list[OwnFault] = []
        with self._reporting():
            if self._options.unconfined:
                self._losses.note(
                    "no-sandbox",
                    "the dump was read without a sandbox, which needs python3-seccomp "
                    "or pyseccomp",
                )
            parts = self._read(progress)
            self._losses.coverage["parts"] = len(SECTIONS) - len(
                {*SECTIONS} & {*parts.errors}
            )
            all_rules = LOG_RULES if parts.target.kind == "log" else RULES
            rules = () if self._options.crash_only else all_rules
            found = self._verdicts(parts, rules)
            unchecked = (*untested(rules, parts), *self._failed)
            log = self._attempt("log", lambda: self._last_lines(parts), ())
            sections = {name: self._section(name, parts) for name in SECTIONS}
            steps = self._attempt("next", lambda: next_steps(parts, found), ())
        progress(_STEPS, _STEPS)
        return TriageReport(
            **self._head(parts.taken_at_ns if parts.is_boot_clock else None, _COVERAGE),
            machine=parts.machine,
            verdicts=tuple(found),
            checked=len({rule.code for rule in rules}) - len(unchecked),
            unchecked=unchecked,
            crash=parts.crash,
            log=log,
            sections=sections,
            next=steps,
            faults=tuple(self._faults),
            parts=parts if self._options.keep_parts else None,
        )

    def _read(self, progress: Progress) -> ReportParts:
        progress(0, _STEPS)
        if (text := log_of_text(self._prog)) is not None:
            return self._read_text(text)
        reader, losses, target = self._reader, self._losses, self._target
        errors: dict[str, str] = {}
        log = self._attempt("log", self._log, ())
        events = self._attempt("log", lambda: tuple(parse_events(log)), ())
        ooms = self._attempt(
            "log", lambda: tuple(parse_ooms(log, target.page_size)), ()
        )
        crash_log = CrashLog(
            events=events,
            oom=ooms[-1] if ooms else None,
            end_ns=log[-1].time_ns if log else 0,
        )
        crash = self._attempt(
            "crash", lambda: find_crash(reader, target, crash_log, losses), None
        )
        machine = self._attempt(
            "machine", lambda: read_machine(reader, target, losses), UNKNOWN
        )
        taken_at_ns = read_clocks(reader, losses).monotonic_ns
        found = {} if self._options.crash_only else self._parts(errors, progress)
        return ReportParts(
            target=target,
            machine=machine,
            taken_at_ns=taken_at_ns,
            crash=crash,
            log=log,
            events=events,
            ooms=ooms,
            coverage={**losses.coverage},
            errors=errors,
            **found,  # type: ignore[arg-type]
        )

    def _read_text(self, text: "LogText") -> ReportParts:
        """Read what a log in a text provides: the other parts need its kernel."""
        choice = choose_boot(text)
        boot = choice.boot
        self._target = target_of_log(self._target, text, choice)
        target, losses = self._target, self._losses
        note_log(text, target, choice, losses)
        ooms = self._attempt(
            "log", lambda: tuple(parse_ooms(boot.records, target.page_size)), ()
        )
        crash_log = CrashLog(
            events=choice.events,
            oom=ooms[-1] if ooms else None,
            end_ns=boot.records[-1].time_ns,
        )
        crash = self._attempt(
            "crash", lambda: find_crash(None, target, crash_log, losses), None
        )
        is_timed = boot.clock is not None
        if crash is not None and boot.clock != "boot":
            crash = replace(crash, time_ns=None)
        return ReportParts(
            target=target,
            machine=machine_of_log(choice),
            taken_at_ns=boot.records[-1].time_ns if is_timed else None,
            crash=crash,
            log=boot.records,
            events=choice.events,
            ooms=ooms,
            coverage={**losses.coverage},
            errors=dict.fromkeys(SECTIONS, LOG_ALONE),
            lacks_levels=not text.has_levels,
            is_boot_clock=boot.clock == "boot",
        )

    def _last_lines(self, parts: ReportParts) -> tuple[str, ...]:
        if not parts.lacks_levels:
            return last_lines(parts.log)
        # Without levels all lines would matter, also of a boot that went well.
        lines = [event.line for event in parts.events]
        lines += (oom.line for oom in parts.ooms)
        lines += (each.line for each in device_errors(parts))
        if not lines:
            return ()
        first = min(lines)
        return last_lines([each for each in parts.log if each.line >= first])

    def _verdicts(
        self, parts: ReportParts, rules: Sequence[VerdictRule[Any]]
    ) -> list[TriageVerdict]:
        """Return the verdicts; without those of rules that fail, which are recorded."""
        found: list[TriageVerdict] = []
        self._failed: list[str] = []
        for rule in rules:
            each = partial(list[TriageVerdict], judge(rule, parts))
            verdicts = self._attempt(f"rule {rule.code}", each, None)
            found += verdicts or []
            if verdicts is None and rule.code not in self._failed:
                self._failed.append(rule.code)
        return worst_first(found)

    def _section(self, name: str, parts: ReportParts) -> ReportSection:
        found = self._attempt(name, lambda: section(name, parts), None)
        return found or ReportSection(error=str(self._faults[-1]))

    def _attempt(self, name: str, make: Callable[[], T], otherwise: U) -> T | U:
        """Return the result of *make*; *otherwise* after a fault of msatools."""
        try:
            return make()
        except (*LOST, TargetError, OSError, MemoryError):
            raise
        except Exception as error:
            self._add_fault(name, error)
            return otherwise

    def _add_fault(self, name: str, error: Exception) -> OwnFault:
        fault = fault_of(error)
        self._faults.append(fault)
        self._losses.note("fault", f"{name}: {fault}", name)
        return fault

    def _log(self) -> tuple[LogRecord, ...]:
        try:
            log = tuple(read_log(self._reader, self._losses))
            # Messages that cannot be read are counted as a loss, not as overwritten.
            unread = self._losses.coverage[Loss.LOG.value]
            if log and (lost := log[0].sequence - unread) > 0:
                self._losses.note(
                    "log-begins",
                    f"the kernel's log begins at {duration(log[0].time_ns)}: "
                    f"{count_text(lost, 'message')} before that "
                    f"{'is' if lost == 1 else 'are'} overwritten",
                )
            return log
        except MissingError as error:
            self._losses.note("log-unknown", f"the kernel's log is not read: {error}")
            return ()

    def _parts(self, errors: dict[str, str], progress: Progress) -> dict[str, object]:
        """Read the report of each command and the other data of the rules, by name."""
        prog, target, options = self._prog, self._target, self._options
        page_size = target.page_size
        readers: Mapping[str, Callable[[], object]] = {
            "prstat": lambda: collect_prstat(
                prog,
                target=target,
                options=Options(whole=True, load=True, causes=options.keep_parts),
            ),
            "stacks": self._stacks,
            "locks": lambda: collect_locks(prog, target=target),
            "zombies": lambda: collect_zombies(prog, target=target),
            "limits": self._limits,
            "cpus": lambda: collect_cpus(
                prog, target=target, options=CpusOptions(irqs=True, stalls=True)
            ),
            "spaces": lambda: tuple(address_spaces(self._reader, self._losses)),
            "memory": lambda: read_memory(self._reader, page_size, self._losses),
            "memstat": lambda: collect_memstat(
                prog, target=target, by=("slab",), memory_map=options.memory_map
            ),
        }
        found: dict[str, object] = {}
        with tasks_read_once(prog):
            for done, (name, read) in enumerate(readers.items(), 1):
                progress(done, _STEPS)
                part = self._part(name, read, errors)
                if isinstance(part, Report):
                    self._add(part)
                if part is not None:
                    found[name] = part
        memstat = found.get("memstat")
        if isinstance(memstat, MemstatReport):
            found["reclaimable_caches"] = self._attempt(
                "memstat", lambda: self._reclaimable_caches(memstat), frozenset()
            )
        whole = found.get("prstat")
        if isinstance(whole, RecordedPrstat):
            found["prstat"] = choose(whole, Options())
            found["load"] = choose(whole, Options(load=True, rows=0)).load
        return found

    def _stacks(self) -> tuple[StackGroup, ...] | None:
        if not self._options.stacks:
            return None
        report = collect_prstat(
            self._prog, target=self._target, options=Options(stacks=True, rows=0)
        )
        self._add(report)
        return report.stacks

    def _limits(self) -> tuple[Limit, ...]:
        """Read the limits that tasks, alive or dead, count against."""
        reader, losses = self._reader, self._losses
        tasks = TaskReader(reader).read_all(losses)
        limits = collect_limits(reader, tasks, np.arange(len(tasks)), losses)
        # ``zombies`` would be the number of all tasks here.
        return tuple(replace(limit, zombies=0) for limit in limits)

    def _reclaimable_caches(self, memstat: MemstatReport) -> frozenset[int]:
        caches = np.array([*slab_groups(memstat)], np.uint64)
        try:
            return reclaimable_caches(self._reader, caches, self._losses)
        except MissingError:
            return frozenset()

    def _part(
        self, name: str, read: Callable[[], T], errors: dict[str, str]
    ) -> T | None:
        """Read a part; if that fails, record why in *errors*, and return ``None``."""
        try:
            return read()
        except (MovedError, OSError):
            # All of it has to be read again, or the kernel is gone.
            raise
        except TargetError as error:
            errors[name] = error.why
        except LOST as error:
            errors[name] = str(error)
        except MemoryError:
            errors[name] = "there is not enough memory"
        except Exception as error:
            errors[name] = str(self._add_fault(name, error))
            self._losses.lose(Loss.PARTS, about=name)
            return None
        self._losses.lose(Loss.PARTS, f"{name}: no report: {errors[name]}", about=name)
        return None

    def _add(self, report: Report) -> None:
        """Add the reads, losses and notes of a part to those of the report."""
        log = LossLog(Counter(report.coverage))
        coverage = self._losses.coverage
        for key in ("reads", "bytes_read"):
            coverage[key] += log.coverage[key]
        for key, count in log.lost.items():
            # Several parts read, and lose, the same things.
            coverage[key] = max(coverage[key], count)
        known = {note.text for note in self._losses.notes.values()}
        for note in report.notes:
            if note.text not in known:
                self._losses.note(note.code, note.text, note.text)


def log_of_text(prog: drgn.Program) -> "LogText | None":
    """Return the log that *prog* was opened for; ``None`` if it is of a kernel."""
    found: LogText | None = prog.cache.get(OPENED_TEXT)
    return found
