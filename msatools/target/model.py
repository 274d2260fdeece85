# SPDX-License-Identifier: LGPL-2.1-or-later

"""What every report says of the kernel it looked at."""

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

Kind = Literal["elf", "kdump", "kcore", "qmp"]
Types = Literal["dwarf", "btf"]


UNLISTED = MappingProxyType({"unlisted": True})
"""Metadata of a field that people see and JSON does not have."""


class Address(int):
    """An address in the kernel looked at; reports show it as ``0x…``."""

    __slots__ = ()


@dataclass(frozen=True)
class Crash:
    """How the kernel died; a field is ``None`` where the dump does not tell."""

    message: str | None
    """The panic or oops line of the kernel log, control characters kept."""

    cpu: int | None
    pid: int | None
    comm: str | None


@dataclass(frozen=True)
class Source:
    """What serves the types of one module."""

    module: str
    """The name of a loadable module, or ``kernel``."""

    types: Types

    path: str | None
    """The file with the debug info; ``None`` for BTF, which the kernel carries."""


@dataclass(frozen=True)
class Capabilities:
    """What can be asked of stack frames, which depends on where types come from."""

    frame_locals: bool
    """Local variables and parameters."""

    inlined_frames: bool
    """Functions that the compiler has put into their callers."""

    source_lines: bool
    """Files and lines."""


_CAPABILITIES: dict[Types, Capabilities] = {
    "dwarf": Capabilities(True, True, True),
    "btf": Capabilities(False, False, False),
}


@dataclass(frozen=True)
class Target:
    """The kernel looked at, and what it was read from."""

    path: str
    """The dump's path, ``/proc/kcore``, or the address of a QMP socket."""

    kind: Kind
    live: bool
    release: str
    arch: str
    page_size: int

    types: Types
    """What serves types and symbols of the kernel proper."""

    dump_level: int | None
    """makedumpfile's ``-d`` bit mask; ``None`` where the format does not keep it."""

    truncated: bool
    """Whether the file ends before its own tables say it should."""

    crash: Crash | None

    format: str = ""
    """The file format in words, such as ``kdump zlib, flattened``."""

    sources: tuple[Source, ...] = field(default=(), metadata=UNLISTED)
    """What serves each module that has types, the kernel proper first."""

    @property
    def capabilities(self) -> Capabilities:
        """What can be asked of the kernel's stack frames."""
        return _CAPABILITIES[self.types]
