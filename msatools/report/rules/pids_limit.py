# SPDX-License-Identifier: LGPL-2.1-or-later

"""A limit of tasks is reached, or nearly: soon nothing can be started any more."""

from collections import Counter
from collections.abc import Iterator

from msgspec import Struct

from msatools.prstat.model import TaskRow
from msatools.report.model import Severity
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.zombies.model import Limit

_NEAR = 0.9
_SYSTEM = "system"
_NAMED = 3


class _NearLimit(Struct, frozen=True):
    limit: Limit
    zombies: int
    parts: ReportParts


def _when(parts: ReportParts) -> Iterator[_NearLimit]:
    known = parts.zombies.limits if parts.zombies is not None else None
    zombies = {(each.name, each.scope): each.zombies for each in known or ()}
    for limit in parts.limits or ():
        if limit.used and limit.max and limit.used >= _NEAR * limit.max:
            count = zombies.get((limit.name, limit.scope), 0)
            yield _NearLimit(limit, count, parts)


def _severity(subject: _NearLimit) -> Severity:
    limit = subject.limit
    return "critical" if limit.scope == _SYSTEM and not limit.left else "warning"


def _words(subject: _NearLimit) -> str:
    limit = subject.limit
    left = "none is left" if not limit.left else f"{limit.left:,} left"
    return (
        f"{limit.name} of {limit.scope}: {limit.used:,} of {limit.max:,} used, {left}"
    )


def _evidence(subject: _NearLimit) -> Iterator[str]:
    yield f"{subject.zombies:,} of them are zombies"
    threads: Counter[str] = Counter()
    for task in subject.parts.prstat.tasks if subject.parts.prstat else ():
        if _counts(task, subject.limit):
            threads[task.comm] += task.threads or 1
    largest = threads.most_common(_NAMED)
    if text := ", ".join(f"{count:,} {comm}" for comm, count in largest if count > 1):
        yield f"most threads: {text}"


def _counts(task: TaskRow, limit: Limit) -> bool:
    """Return whether a process counts against a limit, as far as is known."""
    if limit.name == "pids.max":
        path = task.cgroup or ""
        return path == limit.scope or path.startswith(f"{limit.scope}/")
    if limit.name == "RLIMIT_NPROC":
        return limit.scope == f"uid {task.uid}"
    return True


def _see(subject: _NearLimit) -> tuple[str, ...]:
    if subject.zombies:
        return ("zombies", "-v")
    return ("prstat", "-Z") if subject.limit.name == "pids.max" else ("prstat", "-a")


RULE = VerdictRule(
    code="pids-limit",
    needs=("limits",),
    when=_when,
    severity=_severity,
    confidence="exact",
    words=_words,
    evidence=_evidence,
    see=_see,
)
