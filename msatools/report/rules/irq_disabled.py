# SPDX-License-Identifier: LGPL-2.1-or-later

"""An interrupt is disabled that has come before.

Who waits for it waits until it is enabled. Some drivers disable theirs for a moment, so
that this alone is for information; if tasks have long waited for a disk of that
controller it is the likely cause.
"""

import re
from collections.abc import Iterator

from msgspec import Struct

from msatools.cpus.model import Diagnostic
from msatools.locks.report import Root
from msatools.report.model import Severity
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.waits import stuck_roots

_QUEUE = re.compile(r"irq \d+ (nvme\d+)q\d+ ")
"""How findings name an interrupt of a queue of an NVMe controller, whose disks are
nvme0n1 and so on (drivers/nvme/host/pci.c). Others do not have their disks' names."""


class _Disabled(Struct, frozen=True):
    found: Diagnostic
    roots: list[Root]
    """The disks of its controller that tasks have long waited for."""


def _when(parts: ReportParts) -> Iterator[_Disabled]:
    assert parts.cpus is not None
    stuck = [*stuck_roots(parts.locks)] if parts.locks is not None else []
    for found in parts.cpus.findings:
        if found.code == "irq-disabled":
            of_queue = _QUEUE.match(found.text)
            disks = f"{of_queue[1]}n" if of_queue else None
            yield _Disabled(found, [r for r in stuck if disks and _is_of(r, disks)])


def _is_of(root: Root, disks: str) -> bool:
    return any(name.startswith(disks) for name in root.disks or ())


def _severity(subject: _Disabled) -> Severity:
    return "warning" if subject.roots else "info"


def _evidence(subject: _Disabled) -> Iterator[str]:
    for root in subject.roots:
        yield f"likely the cause of the wait for {root.reason}"
    yield from subject.found.evidence


RULE = VerdictRule(
    code="irq-disabled",
    needs=("cpus",),
    when=_when,
    severity=_severity,
    confidence="exact",
    words=lambda subject: subject.found.text,
    evidence=_evidence,
    see=lambda subject: ("cpus", "-i"),
)
