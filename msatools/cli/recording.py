# SPDX-License-Identifier: LGPL-2.1-or-later

"""Recordings: files with the reports of one run; and gauges of ``--textfile``."""

import contextlib
import os
import re
import time
import zlib
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from types import TracebackType
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

import msatools
from msatools.cli.options import GZIP_BITS, MAX_HEADER, RECORDING
from msatools.cli.output import OutputError, check_writable, replace_file
from msatools.errors import DamagedDataError
from msatools.model import Gauge
from msatools.program.model import TargetError
from msatools.reports import forms

# --- --textfile: gauges for the textfile collector of node_exporter.
#
# Each file is replaced by a rename, as node_exporter may read it at any time. There are
# only gauges in base units, with labels of few values: no names of tasks or files.


def check_textfile(path: str) -> None:
    """Check that metrics can be made and written, before the target is read.

    :raises OutputError: if the path or its suffix is bad, or prometheus_client missing
    """
    if not path.endswith(".prom"):
        raise OutputError(
            f"{path}: node_exporter reads only files that end in .prom; name one"
        )
    check_writable(path)
    if find_spec("prometheus_client") is None:
        raise OutputError(
            f"{path}: prometheus_client is missing, which makes metrics; run pip "
            "install 'msatools[metrics]'"
        )


def write_textfile(path: str, gauges: Iterable[Gauge]) -> None:
    """Replace a file by gauges in Prometheus's text format.

    :raises OutputError: if the file cannot be written
    """
    replace_file(path, exposition(gauges))


def exposition(gauges: Iterable[Gauge]) -> bytes:
    """Return gauges in Prometheus's text format; those without a value are left out."""
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    for gauge in gauges:
        if not gauge.values:
            continue  # the library would show 0
        made = prometheus_client.Gauge(
            gauge.name, gauge.help, gauge.labels, registry=registry
        )
        for labels, value in gauge.values.items():
            (made.labels(*labels) if gauge.labels else made).set(value)
    return prometheus_client.generate_latest(registry)


# --- Recordings: files with the reports of one run of a command.
#
# The first line is a header, each further line a sample, all in JSON. Each line is
# compressed separately, as a member of a gzip file, and written at once: the complete
# lines of a truncated file can be read. zcat shows the file.
#
# The contents of a file are not trusted when it is read.


FORMAT = f"{RECORDING}/1"

_LEVEL = 1
"""Compression level. A sample of 2,264 threads takes 12 ms in all, and 121 KB; with
level 6, 28 ms and 108 KB."""

_MAX_SECONDS = 1e11
"""Maximum time of a sample, so that years have four digits."""

_CHUNK = 1 << 20
_MAX_LINE = 1 << 30
"""Maximum size of an uncompressed line; a report of a million tasks is smaller."""

_FORMER_KEYS = re.compile(rb'"(?:task_class|sched_class|class_name)":')
"""Keys in older recordings, which used field names instead of ``--json``'s keys."""


class RecordingError(TargetError):
    """A file is not a recording, or cannot be read."""


class Header(Struct, frozen=True, kw_only=True):
    """The header of a recording."""

    format: str
    command: str
    """Name of the command, as in ``msa-NAME``."""

    version: str
    """Version of msatools that wrote the file."""


class RecordedSample(Struct, frozen=True):
    """One report, and its time."""

    taken_s: float
    """Seconds since 1970, by the clock of the recording machine."""

    report: Any
    """The report, of the class that :attr:`Recorded.model` of the command returns."""


class Recorder:
    """Writes a recording; removes the file if it has no sample.

    :raises OutputError: if the file exists, or cannot be written
    """

    def __init__(self, path: str, command: str) -> None:
        self._path = path
        self._is_empty = True
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            # Names of tasks and files are confidential.
            self._file = os.open(path, flags, 0o600)
        except FileExistsError as error:
            text = f"{path}: already there; remove it, or name another file"
            raise OutputError(text) from error
        except OSError as error:
            raise self._error(error) from error
        version = msatools.__version__
        self._header = Header(format=FORMAT, command=command, version=version)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)
        if self._is_empty:
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def add(self, report: object) -> None:
        """
        Write a report as the next sample.

        :raises OutputError: if the sample cannot be written
        """
        try:
            if self._is_empty:
                self._write(forms.encode(self._header))
            self._is_empty = False
            self._write(forms.encode(RecordedSample(time.time(), report)))
        except OSError as error:
            raise self._error(error) from error

    def _write(self, line: bytes) -> None:
        packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, GZIP_BITS)
        data = packer.compress(line + b"\n") + packer.flush()
        while data:
            data = data[os.write(self._file, data) :]

    def _error(self, error: OSError) -> OutputError:
        why = (error.strerror or str(error)).lower()
        return OutputError(f"{self._path}: {why}; record to another file")


class Recording:
    """Reads a recording from its beginning.

    :raises RecordingError: if the file cannot be read, or is not a recording
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._count = 0
        self._is_cut = False
        try:
            self._file: BinaryIO = open(path, "rb")  # noqa: SIM115
        except OSError as error:
            raise self._unread(error) from error
        self._lines = self._unpacked()

    def __enter__(self) -> "Recording":
        self.header = self._read_header()
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def samples(self, model: type[Any]) -> Iterator[RecordedSample]:
        """
        Yield the samples in order.

        :param model: Class of the reports.
        :raises RecordingError: if a sample is damaged, or there is none
        """
        sample_type = _sample_type(model)
        for line in self._lines:
            self._count += 1
            with self._damaged():
                sample = forms.decode(_FORMER_KEYS.sub(b'"class":', line), sample_type)
                if not 0 <= sample.taken_s < _MAX_SECONDS:
                    raise DamagedDataError("a time that cannot be")
            yield RecordedSample(sample.taken_s, sample.report)
        if not self._count:
            raise RecordingError(
                self._path, "cut short in its first sample", "record it again"
            )

    @property
    def cut(self) -> str | None:
        """A message if the file is truncated, or ``None``; known after all samples."""
        if not self._is_cut:
            return None
        many = "sample" if self._count == 1 else "samples"
        return f"{self._path}: cut short after {self._count:,} {many}"

    @contextlib.contextmanager
    def damaged(self) -> Iterator[None]:
        """Convert :class:`DamagedDataError` to :class:`RecordingError`."""
        try:
            yield
        except DamagedDataError as error:
            raise self._refused(error) from error

    @contextlib.contextmanager
    def _damaged(self) -> Iterator[None]:
        try:
            yield
        except (
            msgspec.MsgspecError,
            ValueError,
            OverflowError,
            DamagedDataError,
        ) as error:
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> RecordingError:
        made = self.header.version
        other = "" if made == msatools.__version__ else f", or of msatools {made}"
        return RecordingError(
            self._path,
            f"sample {self._count} is damaged{other} ({error})",
            "record it again" if not other else "read it with that one",
        )

    def _read_header(self) -> Header:
        line = next(self._lines, None)
        if line is None:
            raise RecordingError(self._path, "cut short", "record it again")
        try:
            header = forms.decode(line[:MAX_HEADER], Header)
        except (msgspec.MsgspecError, ValueError) as error:
            text = "a recording whose first line is damaged"
            raise RecordingError(self._path, text, "record it again") from error
        if header.format != FORMAT:
            raise RecordingError(
                self._path,
                f"{header.format}, where {FORMAT} is known",
                f"read it with msatools {header.version}, which made it",
            )
        return header

    def _unpacked(self) -> Iterator[bytes]:
        """Yield the lines, each of which is a gzip member."""
        left = b""
        while left or (left := self._read()):
            packed, parts, size = zlib.decompressobj(GZIP_BITS), [], 0
            while not packed.eof:
                try:
                    parts.append(packed.decompress(left, _MAX_LINE - size + 1))
                except zlib.error as error:
                    raise RecordingError(
                        self._path, f"damaged ({error})", "record it again"
                    ) from error
                size += len(parts[-1])
                if size > _MAX_LINE:
                    text = "a sample of more than 1 GiB"
                    raise RecordingError(self._path, text, "record less at once")
                left = packed.unused_data
                if not packed.eof and not (left := self._read()):
                    self._is_cut = True
                    return
            yield b"".join(parts)

    def _read(self) -> bytes:
        try:
            return self._file.read(_CHUNK)
        except OSError as error:
            raise self._unread(error) from error

    def _unread(self, error: OSError) -> RecordingError:
        why = (error.strerror or str(error)).lower()
        return RecordingError(self._path, why, "name a file that --record has written")


def _sample_type(model: type[Any]) -> type[Any]:
    fields = (("taken_s", float), ("report", model))
    return msgspec.defstruct("Sample", fields, forbid_unknown_fields=False)
