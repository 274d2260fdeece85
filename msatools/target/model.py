# SPDX-License-Identifier: LGPL-2.1-or-later

"""Description of the target in every report."""

from typing import Annotated, Literal

from msgspec import Struct

from msatools.model import Mark

Kind = Literal["elf", "kdump", "raw", "kcore", "qmp"]
Types = Literal["dwarf", "btf"]


UNLISTED = Mark("unlisted")
"""Metadata of a field that is shown as text, but is not in JSON."""


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


class Target(Struct, frozen=True):
    """The target kernel, and what it was read from."""

    path: str
    """The dump's path, ``/proc/kcore``, or the address of a QMP socket."""

    kind: Kind
    live: bool
    release: str
    arch: str
    page_size: int

    types: Types
    """Source of types and symbols of the kernel proper."""

    dump_level: int | None
    """makedumpfile's ``-d`` bit mask; ``None`` if the format does not store it."""

    truncated: bool
    """Whether the file is shorter than its headers require."""

    crash: Crash | None

    format: str = ""
    """Name of the file format, such as ``kdump zlib, flattened``."""

    bad_descriptors: Annotated[int, UNLISTED] = 0
    """Number of pages of a kdump that are not in the file, or of an impossible size."""

    lacks_parts: Annotated[bool, UNLISTED] = False
    """Whether it is a split dump, and not all parts are there."""

    lost_symbols: Annotated[int, UNLISTED] = 0
    """Number of the kernel's symbols that were lost with pages of their table."""

    torn: Annotated[int, UNLISTED] = 0
    """Number of contradictions in memory without a dump's headers: it was copied while
    its guest ran on."""

    options: Annotated[tuple[str, ...], UNLISTED] = ()
    """Options that say which of several kernels in the file this is."""

    sources: Annotated[tuple[Source, ...], UNLISTED] = ()
    """Source of each module that has types, the kernel proper first."""

    @property
    def capabilities(self) -> Capabilities:
        """What the kernel's stack frames show."""
        return _CAPABILITIES[self.types]
