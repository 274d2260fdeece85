# SPDX-License-Identifier: LGPL-2.1-or-later

"""Kernels that were found in memory, and proof that each is one.

A copy of VMCOREINFO alone proves nothing: a former kernel's page outlives kexec, a
nested guest's lies in its host, and any program can hold the text. What it says has to
be there: the names of the system (``init_uts_ns``) at the address that it gives, of the
same release, and page tables that map the kernel's text to where it says.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from drgn import Architecture, FaultError

from msatools.errors import UNREADABLE, DamagedDataError
from msatools.target.arch.arm64 import arm64_format
from msatools.target.arch.x86_64 import START_KERNEL_MAP, x86_format
from msatools.target.paging import TableFormat, TableWalk
from msatools.target.raw.memory import PAGE_BYTES, Memory
from msatools.target.raw.search import Words, find_words

Read = Callable[[int, int], bytes]
"""``read(address, size)`` of physical memory; raises FaultError."""

_TEXT = b"OSRELEASE="
_NOTE = b"VMCOREINFO\0\0" + _TEXT
_NOTE_BYTES = 24
"""Header and name of the ELF note, which the kernel keeps in pages of its own."""

_MOST_BYTES = PAGE_BYTES
"""VMCOREINFO_BYTES (include/linux/crash_core.h, linux/vmcore_info.h) is a page."""

_MOST_KERNELS = 64
_MOST_COPIES = 1024

_SYSNAME = b"Linux".ljust(65, b"\0")
_UTS_FIELD = 65
_RELEASE = 2 * _UTS_FIELD
_NAMES_BYTES = _RELEASE + _UTS_FIELD
"""``struct new_utsname``: sysname, nodename, release, each of 65 bytes."""

_NAMES = ((0, _TEXT), (12, _NOTE))


class FoundKernel(NamedTuple):
    """What a copy of VMCOREINFO says of its kernel."""

    copies: tuple[int, ...]
    """Addresses of pages that begin with it, in the memory that was searched: the
    kernel's own, and the one that it keeps for a crash. Empty if only the note that is
    made of it was found."""

    text: bytes
    """VMCOREINFO itself."""

    lines: Mapping[str, str]
    arch: Architecture
    image_offset: int
    """Virtual minus physical address of the kernel's image."""

    @property
    def release(self) -> str:
        """``utsname.release``."""
        return self.lines["OSRELEASE"]

    @property
    def uts_name(self) -> int:
        """Physical address of ``init_uts_ns.name``."""
        # Added by Linux kernel commit ca4a9241cc5e ("kdump: append uts_namespace.name
        # offset to VMCOREINFO") (in v5.11); before, a struct kref came first.
        inner = int(self.lines.get("OFFSET(uts_namespace.name)", "4"))
        return self.symbol("init_uts_ns") - self.image_offset + inner

    def symbol(self, name: str) -> int:
        """Return the virtual address of a symbol.

        :raises DamagedDataError: if VMCOREINFO does not have it
        """
        try:
            return int(self.lines[f"SYMBOL({name})"], 16)
        except (KeyError, ValueError):
            raise DamagedDataError(f"VMCOREINFO without {name}") from None

    def is_at(self, read: Read) -> bool:
        """Return whether memory has, where VMCOREINFO says, a kernel of this release.

        :param read: Reads physical memory.
        """
        try:
            return self.is_named(read(self.uts_name, _NAMES_BYTES))
        except (*UNREADABLE, OverflowError):
            return False

    def is_named(self, name: bytes) -> bool:
        """Return whether a ``struct new_utsname`` is of this release.

        :param name: Its first :data:`_NAMES_BYTES`.
        """
        release = name[_RELEASE:].partition(b"\0")[0]
        return name.startswith(_SYSNAME) and release == self.release.encode()

    def is_mapped(self, read: Read) -> bool:
        """Return whether the kernel's page tables map its text to where it says."""
        try:
            form = _table_format(self)
            root = self.symbol("swapper_pg_dir") - self.image_offset
            walk = TableWalk(form, root, lambda table: read(table, form.table_bytes))
            text = self.symbol("_stext")
            found = walk.find(text)
        except (*UNREADABLE, ValueError, OverflowError, struct.error):
            return False
        return found is not None and found[0] == text - self.image_offset


def find_kernels(memory: Memory) -> list[FoundKernel]:
    """Search memory for VMCOREINFO; return those that differ, as they were found."""
    wanted = [Words(offset, text) for offset, text in _NAMES]
    found: dict[bytes, FoundKernel] = {}
    copies = 0
    for page, number in find_words(memory, wanted):
        start = page + (_NOTE_BYTES if number else 0)
        try:
            # The note of the text may cross into the next page.
            text = _text(memory.read(start, page + _MOST_BYTES - start))
            kernel = parse_kernel(text)
        except UNREADABLE:
            continue
        known = found.setdefault(_identity(kernel), kernel)
        if number == 0:
            pages = (*known.copies, page)
            found[_identity(kernel)] = known._replace(copies=pages)
        copies += 1
        if len(found) >= _MOST_KERNELS or copies >= _MOST_COPIES:
            break
    return list(found.values())


def parse_kernel(text: bytes) -> FoundKernel:
    """Return what VMCOREINFO says of a kernel.

    :raises DamagedDataError: if it does not say enough
    """
    rows = text.decode("ascii", "replace").splitlines()
    lines = dict(row.split("=", 1) for row in rows if "=" in row)
    if not lines.get("OSRELEASE"):
        raise DamagedDataError("VMCOREINFO without a release")
    arch, offset = _placed(lines)
    kernel = FoundKernel((), text, lines, arch, offset)
    for name in ("init_uts_ns", "swapper_pg_dir", "_stext"):
        kernel.symbol(name)
    return kernel


def _text(data: bytes) -> bytes:
    """Return the lines at the start of a page."""
    return data.partition(b"\0")[0]


def _identity(kernel: FoundKernel) -> bytes:
    """Return what the copies of one boot have the same; a crash adds its time."""
    return b"\n".join(
        row for row in kernel.text.splitlines() if not row.startswith(b"CRASHTIME=")
    )


def _placed(lines: Mapping[str, str]) -> tuple[Architecture, int]:
    """Return the architecture, and where the image lies.

    Each has a line that no other has: arch/x86/kernel/vmcore_info_64.c,
    arch/arm64/kernel/vmcore_info.c, arch/riscv/kernel/vmcore_info.c.
    """
    for name, arch in (
        ("phys_base", Architecture.X86_64),
        ("kimage_voffset", Architecture.AARCH64),
        ("va_kernel_pa_offset", Architecture.RISCV64),
    ):
        value = lines.get(f"NUMBER({name})")
        if value is not None:
            try:
                number = int(value, 0)
            except ValueError:
                raise DamagedDataError(f"VMCOREINFO: {name}={value}") from None
            return arch, START_KERNEL_MAP - number if name == "phys_base" else number
    raise DamagedDataError("VMCOREINFO of an unknown machine")


def _table_format(kernel: FoundKernel) -> TableFormat:
    """Return the format of a kernel's page tables, by VMCOREINFO alone.

    :raises DamagedDataError: if it is of a machine whose tables are not read
    :raises ValueError: if a number in it is none
    """
    lines = kernel.lines
    if kernel.arch == Architecture.X86_64:
        top = (48,) if int(lines.get("NUMBER(pgtable_l5_enabled)", "0")) else ()
        return x86_format(
            (*top, 39, 30, 21, 12), int(lines.get("NUMBER(sme_mask)", "0"), 0)
        )
    if kernel.arch == Architecture.AARCH64:
        built = int(lines.get("NUMBER(VA_BITS)", "48"))
        shift = int(lines.get("PAGESIZE", "4096")).bit_length() - 1
        size = int(lines.get("NUMBER(TCR_EL1_T1SZ)", "0"), 0)
        bits = 64 - size if size else built
        if not (12 <= shift <= 16 and shift < bits <= 52 and built <= 52):
            raise DamagedDataError(f"addresses of {bits} bits")
        return arm64_format(shift, bits, built)
    raise DamagedDataError("page tables that are not read")


def find_names(memory: Memory, kernel: FoundKernel) -> Iterator[int]:
    """Yield where ``init_uts_ns.name`` of a kernel may lie, by address of the memory.

    It is at the same place of a page, wherever that page lies.
    """
    within = kernel.uts_name % PAGE_BYTES
    if within % 4:
        return
    for page, _ in find_words(memory, [Words(within, _SYSNAME[:8])]):
        try:
            name = memory.read(page + within, _NAMES_BYTES)
        except FaultError:
            continue
        if kernel.is_named(name):
            yield page + within
