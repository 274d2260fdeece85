# SPDX-License-Identifier: LGPL-2.1-or-later

"""The model of a fleet, and the report on one dump by a process with limits."""

import json
import math
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Struct

import msatools
from msatools.model import Mark
from msatools.reports.units import signal_name

# --- Errors of a fleet, with a text for the user.


class FleetError(Exception):
    """Dumps, results or the cluster cannot be used; the text says what to do."""


def require(*modules: str) -> None:
    """Check that optional packages are installed.

    :raises FleetError: if one is missing
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise FleetError(
            f"{', '.join(missing)}: not installed; run pip install 'msatools[fleet]'"
        )


# --- One dump in a process of its own, whose time, memory and output are bounded.
#
# This is the work of one Dask task. Whatever a dump does to the process that reads it
# becomes one outcome.


State = Literal["done", "failed", "timeout", "crashed"]
"""``done``: there is a report; ``failed``: the dump cannot be opened or read;
``timeout``: reading it took too long; ``crashed``: reading it ended by a signal."""


def program(module: str) -> tuple[str, ...]:
    """Return the command that calls ``main`` of a module.

    It imports from where this process does, but not from the current directory: anyone
    may be able to write to a folder of dumps.
    """
    paths = [path for path in sys.path if path]
    code = f"import sys; sys.path[:] = {paths!r}; from {module} import main"
    return (sys.executable, "-I", "-c", f"{code}; sys.exit(main())")


BOUNDED = program("msatools.console")
"""The command that reads a dump within limits of memory and time."""

MAX_OUTPUT_BYTES = 64 << 20
"""Maximum size of a report; most have some kilobytes."""

NO_REPORT = "what was printed is no report"

_MAX_LINE = 1000
"""Characters of an error that are kept."""

_SCHEMA = "msatools.report/1"
_POLL_S = 0.5
_CHUNK = 1 << 16


class Bounds(Struct, frozen=True, kw_only=True):
    """Limits for reading one dump; ``seconds`` bounds both elapsed and CPU time."""

    memory_bytes: int
    seconds: int


class Outcome(Struct, frozen=True, kw_only=True):
    """The result for one dump: its report, or why there is none."""

    state: State
    error: str | None
    """One line; ``None`` if there is a report."""

    report: str | None
    """The report as JSON; ``None`` if there is none."""

    seconds: float
    """How long reading took."""

    worker: str
    """Host that read it."""

    version: str = msatools.__version__
    """Version of msatools there."""


def report_dump(path: str, bounds: Bounds, program: Sequence[str] = BOUNDED) -> Outcome:
    """Return the report of the dump at *path*, or the error for which it has none.

    :param program: Command that prints the report; its arguments: this PID, bytes
        of memory, seconds, the command and its arguments.
    """
    start = time.monotonic()
    words = (
        *(*program, str(os.getpid()), str(bounds.memory_bytes), str(bounds.seconds)),
        *("report", "--json", "-c", path),
    )
    state, error, report = _run(words, bounds, start + bounds.seconds)
    return Outcome(
        state=state,
        error=error,
        report=report,
        seconds=time.monotonic() - start,
        worker=socket.gethostname(),
    )


def _run(
    words: Sequence[str], bounds: Bounds, end_s: float
) -> tuple[State, str | None, str | None]:
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Ctrl-C is for the run; the process ends with its worker.
        start_new_session=True,
    ) as process:
        try:
            out, err, why = _read(process, end_s)
            if why is None:
                process.wait(max(end_s - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            why = "timeout"
        finally:
            process.kill()
    if why == "timeout":
        return "timeout", f"reading it took over {bounds.seconds} s", None
    if why is not None:
        return "failed", why, None
    return _outcome(process.returncode, out, _last_line(err), bounds)


def _read(
    process: "subprocess.Popen[bytes]", end_s: float
) -> tuple[bytes, bytes, str | None]:
    """Return stdout and stderr of a process, and why reading stopped early, if so."""
    assert process.stdout is not None
    assert process.stderr is not None
    kept = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    out, err = kept.values()
    with selectors.DefaultSelector() as selector:
        for number in kept:
            selector.register(number, selectors.EVENT_READ)
        while selector.get_map():
            if time.monotonic() > end_s:
                return b"", b"", "timeout"
            for key, _ in selector.select(_POLL_S):
                data = os.read(key.fd, _CHUNK)
                if not data:
                    selector.unregister(key.fd)
                kept[key.fd] += data
            if len(out) + len(err) > MAX_OUTPUT_BYTES:
                return b"", b"", f"its report has over {MAX_OUTPUT_BYTES:,} bytes"
    return bytes(out), bytes(err), None


def _last_line(err: bytes) -> str:
    lines = err.decode("utf-8", "backslashreplace").strip().splitlines()
    line = lines[-1] if lines else ""
    return line.removeprefix("msa-report: ")[:_MAX_LINE]


def _outcome(
    status: int, out: bytes, line: str, bounds: Bounds
) -> tuple[State, str | None, str | None]:
    if status < 0:
        name = signal_name(-status)
        if name == "SIGXCPU":
            return "timeout", f"reading it took over {bounds.seconds} s of CPU", None
        hint = ": it was killed, or memory ran out" if name == "SIGKILL" else ""
        return "crashed", f"reading it ended by {name}{hint}", None
    if status:
        return "failed", line or f"reading it ended with status {status}", None
    try:
        report = out.decode()
        parse_report(report)
    except ValueError:
        return "crashed", NO_REPORT, None
    return "done", None, report


def parse_report(text: str) -> Mapping[str, Any]:
    """Parse the JSON of a report, whose numbers must be finite.

    :raises ValueError: if *text* is no such report
    """
    try:
        report = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError as error:
        raise ValueError(NO_REPORT) from error
    if not isinstance(report, dict) or report.get("schema") != _SCHEMA:
        raise ValueError(NO_REPORT)
    return report


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(NO_REPORT)
    return number


# --- The model of a fleet: its dumps, and the buckets that they fall into.


_UNLISTED = Mark("unlisted")


class FleetVerdict(Struct, frozen=True, kw_only=True):
    """A verdict of a report, without its evidence."""

    code: str
    """One of the codes in docs/commands/report.md."""

    severity: str
    """critical, warning or info."""

    confidence: str
    """exact, likely or evidence."""

    text: str
    """One sentence."""


class FleetDump(Struct, frozen=True, kw_only=True):
    """One dump, and its result."""

    path: str
    """Where the dump lay when it was read."""

    identity: str
    """The same for copies of a dump: see docs/commands/fleet.md."""

    state: State
    """done: there is a report; failed: it cannot be read; timeout, crashed: reading it
    took too long, or ended by a signal."""

    error: str | None
    """One line; ``None`` if there is a report."""

    report: Mapping[str, Any] | None
    """The output of msa-report --json; ``None`` if there is none."""

    host: str | None
    """Name of the host; ``None`` if it is not known."""

    release: str | None
    """Release of the kernel; ``None`` if it is not known."""

    time: str | None
    """When the kernel stopped, or the dump was written: UTC, as ISO 8601."""

    fingerprint: str | None
    """Fingerprint of the crash (docs/guides/fingerprints.md); ``None`` without one."""

    time_ns: Annotated[int | None, _UNLISTED]
    cause: Annotated[str | None, _UNLISTED]
    function: Annotated[str | None, _UNLISTED]
    module: Annotated[str | None, _UNLISTED]
    is_truncated: Annotated[bool, _UNLISTED]
    is_log: Annotated[bool, _UNLISTED] = False
    """Whether it is a kernel's log, and no dump."""

    verdicts: Annotated[tuple[FleetVerdict, ...], _UNLISTED]


class Bucket(Struct, frozen=True, kw_only=True):
    """Dumps that have one thing in common: they are most likely of one bug."""

    fingerprint: str | None
    """Fingerprint that the dumps share; ``None`` if the kernels have not crashed: then
    they share ``codes``."""

    codes: tuple[str, ...]
    """Codes of the worst verdicts of the dumps; empty if there is a fingerprint."""

    cause: str | None
    """Cause of the crash; ``None`` if there was none."""

    function: str | None
    """The faulting function, of the representative."""

    module: str | None
    """The module of that function; ``None`` for the kernel proper."""

    count: int
    """Number of dumps."""

    first: str | None
    """When the first of them was written: UTC, as ISO 8601."""

    last: str | None
    """When the last of them was written: UTC, as ISO 8601."""

    releases: tuple[str, ...]
    """Releases of the kernels."""

    hosts: tuple[str, ...]
    """Names of the hosts, as far as they are known."""

    representative: str
    """Path of the newest dump that is not truncated, and no log if there is another."""

    verdicts: tuple[FleetVerdict, ...]
    """Verdicts of the representative, the worst first."""

    days: Mapping[str, int]
    """Number of dumps by day (UTC); without those whose time is not known."""

    first_ns: Annotated[int | None, _UNLISTED]
    last_ns: Annotated[int | None, _UNLISTED]


class FleetNote(Struct, frozen=True, kw_only=True):
    """One fact that limits how far the results can be trusted."""

    code: str
    """results-lost: a file of results cannot be read; mark-damaged: the file that marks
    the folder as one of results is damaged."""

    text: str
    """One sentence."""


class FleetReport(Struct, frozen=True, kw_only=True):
    """The dumps of a fleet, and their buckets."""

    schema: ClassVar[str] = "msatools.fleet/1"

    coverage: Mapping[str, int]
    """Number of files of results: ``files_read`` and ``files_unreadable``."""

    notes: tuple[FleetNote, ...]
    dumps: tuple[FleetDump, ...]
    buckets: tuple[Bucket, ...]
    """The largest first."""

    states: Annotated[Mapping[str, int], _UNLISTED]
    """Number of dumps by state."""

    @property
    def lost(self) -> tuple[FleetDump, ...]:
        """Dumps without a report."""
        return tuple(dump for dump in self.dumps if dump.state != "done")

    @property
    def outliers(self) -> tuple[Bucket, ...]:
        """Buckets of one dump; empty if no bucket has several."""
        if len(self.buckets) == sum(bucket.count == 1 for bucket in self.buckets):
            return ()
        return tuple(bucket for bucket in self.buckets if bucket.count == 1)
