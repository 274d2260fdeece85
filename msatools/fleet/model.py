# SPDX-License-Identifier: LGPL-2.1-or-later

"""What is known of a fleet: its dumps, and the buckets that they fall into."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Struct

from msatools.fleet.single import State
from msatools.model import Mark

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
    """One dump, and what came of it."""

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
    """Of the crash: see docs/guides/fingerprints.md; ``None`` if there was none."""

    time_ns: Annotated[int | None, _UNLISTED]
    cause: Annotated[str | None, _UNLISTED]
    function: Annotated[str | None, _UNLISTED]
    module: Annotated[str | None, _UNLISTED]
    is_truncated: Annotated[bool, _UNLISTED]
    verdicts: Annotated[tuple[FleetVerdict, ...], _UNLISTED]


class Bucket(Struct, frozen=True, kw_only=True):
    """Dumps that have one thing in common: they are most likely of one bug."""

    fingerprint: str | None
    """What they have in common; ``None`` of kernels that have not crashed, which have
    the codes of their worst verdicts in common."""

    codes: tuple[str, ...]
    """These codes; empty if there is a fingerprint."""

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
    """Path of the newest dump that is not truncated."""

    verdicts: tuple[FleetVerdict, ...]
    """Those of the representative, the worst first."""

    days: Mapping[str, int]
    """Number of dumps by day (UTC); without those whose time is not known."""

    first_ns: Annotated[int | None, _UNLISTED]
    last_ns: Annotated[int | None, _UNLISTED]


class FleetNote(Struct, frozen=True, kw_only=True):
    """One fact that limits how far the results can be trusted."""

    code: str
    """results-lost: a file of results cannot be read; mark-damaged: nor can the one
    that says that it is a folder of results."""

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
        """Buckets of one dump, where others have several."""
        if len(self.buckets) == sum(bucket.count == 1 for bucket in self.buckets):
            return ()
        return tuple(bucket for bucket in self.buckets if bucket.count == 1)
