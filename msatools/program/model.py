# SPDX-License-Identifier: LGPL-2.1-or-later

"""Description of the target in every report, and errors of opening one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

from drgn import FaultError
from msgspec import Struct

from msatools.errors import DamagedDataError, MissingError
from msatools.model import Mark

# --- Errors for targets that cannot be opened or read, with a text for the user.


class TargetError(Exception):
    """A target, or its types, cannot be opened.

    :param what: What was requested, usually a path.
    :param why: What is wrong with it.
    :param what_to_do: The next step for the user.
    """

    def __init__(self, what: str, why: str, what_to_do: str) -> None:
        super().__init__(what, why, what_to_do)
        self.what = what
        self.why = why
        self.what_to_do = what_to_do

    def __str__(self) -> str:
        return f"{self.what}: {self.why}; {self.what_to_do}"


class NotADumpError(TargetError):
    """The file can be read, but it is not a dump of a kernel."""


class DamagedDumpError(TargetError):
    """The file is a dump, but too damaged to be opened."""


class UnsupportedMachineError(TargetError):
    """The dump is of a machine that is not supported."""

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(
            path,
            f"a dump of a {kind} kernel, and only 64-bit little-endian ones are read",
            "use crash, or drgn by itself",
        )


class NotPermittedError(TargetError):
    """The target exists, but this user or this kernel may not read it."""


class NoTypesError(TargetError):
    """No source has the types and symbols of this kernel."""


class WrongBuildError(TargetError):
    """The debug info belongs to another build of the kernel."""


KCORE = "/proc/kcore"


class MovedError(TargetError):
    """The offsets in /proc/kcore changed during a report, so its data are wrong."""

    def __init__(self) -> None:
        super().__init__(
            KCORE, "memory was added or removed while it was read", "run it again"
        )


def damaged_types(what: str, error: Exception) -> NoTypesError:
    """Return the error for damaged types in a kernel."""
    return NoTypesError(
        what,
        f"the types that the kernel carries are damaged: {error}",
        "name its vmlinux with -s",
    )


@contextmanager
def losses_refused(
    what: str, *, live: bool = False, truncated: bool = False
) -> Iterator[None]:
    """Convert errors for missing or damaged data, without which there is no report.

    :param what: What was requested, usually a path.
    :param live: Whether the kernel runs.
    :param truncated: Whether the dump is truncated.
    :raises TargetError: for such an error; any other is a fault of msatools and passes
    """
    try:
        yield
    except MissingError as error:
        raise TargetError(
            what,
            f"its kernel or its types lack something ({error})",
            "name the full vmlinux with -s, if you did not",
        ) from error
    except FaultError as error:
        if truncated:
            raise DamagedDumpError(
                what, "cut off, and too little is left", "copy the dump again"
            ) from error
        raise TargetError(
            what,
            f"it lacks memory that the report needs ({error})",
            "try again" if live else "take a dump that leaves less out",
        ) from error
    except DamagedDataError as error:
        if live:
            raise TargetError(
                what, f"its data make no sense ({error})", "try again"
            ) from error
        raise DamagedDumpError(
            what,
            f"its data are damaged ({error})",
            "copy the dump again; another command may need less of it",
        ) from error
    except MemoryError as error:
        raise TargetError(
            what,
            "there is not enough memory to read it",
            "give it more, or copy the dump again if it may be damaged",
        ) from error
    except OSError as error:
        why = error.strerror or str(error)
        if live:
            raise TargetError(
                what, f"the kernel is gone: {why}", "start it again"
            ) from error
        raise TargetError(
            what, f"it cannot be read: {why}", "check the disk, and copy the dump again"
        ) from error


# --- Description of the target in every report.


Kind = Literal["elf", "kdump", "raw", "kcore", "qmp", "log"]
Types = Literal["dwarf", "btf"]


UNLISTED = Mark("unlisted")
"""Metadata of a field that is not in JSON; reports as text may show it."""


class Address(int):
    """An address in the target kernel; reports show it as ``0x…``."""

    __slots__ = ()


class Crash(Struct, frozen=True):
    """How the kernel crashed; a field is ``None`` if it is unknown."""

    message: str | None
    """The panic or oops line of the kernel log, control characters kept."""

    cpu: int | None
    pid: int | None
    comm: str | None


class Source(Struct, frozen=True):
    """Source of the types of one module."""

    module: str
    """The name of a loadable module, or ``kernel``."""

    types: Types

    path: str | None
    """File with the debug info; ``None`` for the kernel's own BTF."""


class Capabilities(Struct, frozen=True):
    """What stack frames show, which depends on the source of types."""

    frame_locals: bool
    """Whether they have local variables and parameters."""

    inlined_frames: bool
    """Whether they include inlined functions."""

    source_lines: bool
    """Whether they have source files and lines."""


_CAPABILITIES: dict[Types, Capabilities] = {
    "dwarf": Capabilities(True, True, True),
    "btf": Capabilities(False, False, False),
}


class LogSpan(Struct, frozen=True):
    """The part of a text that is the log of one boot."""

    lines: int
    """Number of lines of the whole text."""

    first_line: int
    """Number of the boot's first line, from 1."""

    last_line: int
    """Number of the boot's last line."""

    begins: str | None
    """The boot's first time, as the text writes it; ``None`` if no line has a time."""

    ends: str | None
    """The boot's last time, as the text writes it; ``None`` if no line has a time."""

    boot: int
    """Number of this boot among those in the text, from 1."""

    boots: int
    """Number of boots in the text."""


class Target(Struct, frozen=True):
    """The target kernel, and what it was read from."""

    path: str
    """Path of the dump or log, ``/proc/kcore``, or the address of a QMP socket."""

    kind: Kind
    live: bool
    # None for a log that does not have it.
    release: str | None
    arch: str | None
    page_size: int

    types: Types | None
    """Source of types and symbols of the kernel proper; ``None`` for a log."""

    dump_level: int | None
    """makedumpfile's ``-d`` bit mask; ``None`` if the format does not store it."""

    truncated: bool
    """Whether the file is shorter than its headers require."""

    crash: Crash | None

    format: str = ""
    """Name of the file format, such as ``kdump zlib, flattened``."""

    log: Annotated[LogSpan | None, Mark("added")] = None
    """The part of a text that the log is; ``None`` if the target is no log."""

    bad_descriptors: Annotated[int, UNLISTED] = 0
    """Number of pages of a kdump that are not in the file, or of an impossible size."""

    lacks_parts: Annotated[bool, UNLISTED] = False
    """Whether the target is a split dump of which parts are missing."""

    lost_symbols: Annotated[int, UNLISTED] = 0
    """Number of the kernel's symbols that were lost with pages of their table."""

    torn: Annotated[int, UNLISTED] = 0
    """Number of contradictions in a file of raw memory; above 0 if the memory was
    copied while its guest ran on."""

    options: Annotated[tuple[str, ...], UNLISTED] = ()
    """Command-line options that selected or located this kernel in the file."""

    sources: Annotated[tuple[Source, ...], UNLISTED] = ()
    """Source of types of each module that has types, the kernel proper first."""

    @property
    def capabilities(self) -> Capabilities:
        """What the kernel's stack frames show."""
        return _CAPABILITIES[self.types or "btf"]
