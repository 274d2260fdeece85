# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rows of the results: one a dump, and one a verdict, from the JSON of its report."""

import re
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

import msatools
from msatools.fleet.identity import END_S, Identity
from msatools.fleet.single import NO_REPORT, Outcome, parse_report

Row = Mapping[str, object]

VERSION = msatools.__version__
"""Version of the reports: another one has each dump read anew."""

_CODE = re.compile("[a-z][a-z0-9-]{0,39}")
"""What the code of a verdict looks like."""


class Result(Struct, frozen=True, kw_only=True):
    """The rows of one dump."""

    dump: Row
    verdicts: tuple[Row, ...]

    @property
    def state(self) -> str:
        """The state of the dump: see :data:`.single.State`."""
        return str(self.dump["state"])


def result_of(identity: Identity, outcome: Outcome) -> Result:
    """Return the rows of a dump, ready to be stored."""
    try:
        return _result(identity, outcome)
    except (AttributeError, KeyError, TypeError, ValueError):
        # The process that printed it has read the dump, and is not to be trusted.
        broken = replace(outcome, state="crashed", error=NO_REPORT, report=None)
        return _result(identity, broken)


def _result(identity: Identity, outcome: Outcome) -> Result:
    report = parse_report(outcome.report) if outcome.report else {}
    result = uuid.uuid4().hex
    return Result(
        dump={
            "result": result,
            "identity": identity.digest,
            "path": _text(identity.path),
            "size_bytes": identity.size_bytes,
            "state": outcome.state,
            "error": _text(outcome.error),
            "version": VERSION,
            "finished_ns": time.time_ns(),
            "seconds": outcome.seconds,
            "worker": _text(outcome.worker),
            **_of_header(identity, report),
            **_of_crash(report.get("crash") or {}),
            "report": _text(outcome.report),
        },
        verdicts=tuple(_verdicts(result, identity.digest, report)),
    )


def _of_header(identity: Identity, report: Mapping[str, Any]) -> Row:
    """Return what headers say, and of the rest what the report says."""
    machine = report.get("machine") or {}
    target = report.get("target") or {}
    host = _text(machine.get("host"))
    return {
        # makedumpfile copies the name from where the report has it from.
        "host": identity.host or (None if host == "(none)" else host),
        "release": identity.release or _text(target.get("release")),
        "arch": _text(target.get("arch")),
        "format": _text(target.get("format")),
        "truncated": bool(target.get("truncated")) if report else None,
        "time_ns": _time_ns(machine.get("time_ns")) or identity.time_ns,
        "uptime_ns": _number(machine.get("uptime_ns")),
        "cpus": _number(machine.get("cpus")),
        "ram_bytes": _number(machine.get("ram_bytes")),
    }


def _of_crash(crash: Mapping[str, Any]) -> Row:
    names = ("cause", "message", "function", "module", "taints", "comm", "fingerprint")
    numbers = ("cpu", "pid")
    return {
        **{name: _text(crash.get(name)) for name in names},
        **{name: _number(crash.get(name)) for name in numbers},
        "frames": _texts(crash.get("frames")),
    }


def _verdicts(result: str, identity: str, report: Mapping[str, Any]) -> Iterator[Row]:
    for rank, verdict in enumerate(report.get("verdicts") or ()):
        if not _CODE.fullmatch(verdict["code"]):
            raise ValueError(NO_REPORT)
        names = ("code", "severity", "confidence", "text")
        yield {
            "result": result,
            "identity": identity,
            "rank": rank,
            **{name: _storable(verdict[name]) for name in names},
            "see": _text(verdict.get("see")),
            "evidence": _texts(verdict.get("evidence")),
        }


def _text(value: object) -> str | None:
    return _storable(value) if isinstance(value, str) else None


def _texts(values: Any) -> list[str]:
    return [_storable(str(value)) for value in values or ()]


def _storable(text: str) -> str:
    # Parquet has UTF-8 only, and JSON may have halves of surrogate pairs.
    return text.encode("utf-8", "backslashreplace").decode()


def _number(value: object) -> int | None:
    """Return a number that fits into a column of 64 bits."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number:
        return None
    assert isinstance(value, int)
    return value if -(1 << 63) <= value < 1 << 63 else None


def _time_ns(value: object) -> int | None:
    """Return a time that is one of these centuries."""
    number = _number(value)
    return number if number is not None and 0 < number < END_S * 10**9 else None
