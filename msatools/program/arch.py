# SPDX-License-Identifier: LGPL-2.1-or-later

"""Architectures: address ranges, formats of page tables, registers, calls.

A new architecture is a class here, and a line in ``_ARCHITECTURES``.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

import drgn
import numpy as np
import numpy.typing as npt
from drgn import FaultError, Program
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.selfdesc.find import (
    find_constant,
    find_symbol,
    find_variable,
    hex_number,
    number,
    vmcoreinfo,
    vmcoreinfo_number,
)

# --- Format of a kernel's page tables, and translation of single addresses.
#
# Levels, sizes and the bits of entries are in TableFormat only, which is also used to
# process whole tables at once. table_format(), at the end, returns that of a kernel.


Words = npt.NDArray[np.uint64]
Booleans = npt.NDArray[np.bool_]

_U64 = struct.Struct("<Q")


class TableFormat(Struct, frozen=True):
    """
    Format of the page tables of one kernel; entries have 8 bytes.

    A table fills a page, except that at the top level it may be smaller.
    """

    shifts: tuple[int, ...]
    """Shift of each level, the top one first: log2 of the bytes that an entry covers
    (PGDIR_SHIFT, ..., PAGE_SHIFT)."""

    frame: int
    """Mask of the physical address in an entry."""

    largest: int
    """Largest shift of an entry that can map a huge page."""

    huge: int
    """Bits any of which marks an entry above the lowest level that maps a huge page."""

    protnone: int
    """Bits any of which marks an entry that maps an inaccessible page, and is not
    ``present``."""

    special: int
    """Bit of an entry that maps the zero page or device memory (vm_normal_page())."""

    swap_type_shift: int
    """Shift of the swap device's number in a swap entry; the number has 5 bits."""

    top_entries: int
    """Number of entries in a top-level table."""

    user_entries: int
    """Number of user entries in a process's top-level table; they come first."""

    kernel_entry: int
    """Index of the first entry of the kernel's top-level table that maps the kernel."""

    present: int = 1 << 0
    high: int = 0
    """Mask of more bits of the physical address in an entry."""

    high_shift: int = 0
    """Number of bits by which ``high`` is shifted to the left."""

    flip: int = 0
    """Equal to ``huge`` if that bit is clear in an entry that maps a huge page, else 0:
    the bits to invert before ``huge`` is tested."""

    hardware: int = 0
    """Bits accessed and dirty, which some CPUs set in an empty entry (erratum)."""

    inverts: bool = False
    """Whether the address is inverted in an entry that is not present."""

    @property
    def levels(self) -> int:
        """Number of levels."""
        return len(self.shifts)

    @property
    def page_shift(self) -> int:
        """log2 of the size of a page."""
        return self.shifts[-1]

    @property
    def table_bytes(self) -> int:
        """Size of a table, except at the top level."""
        return 1 << self.page_shift

    @property
    def entries(self) -> int:
        """Number of entries in a table, except at the top level."""
        return self.table_bytes // 8

    @property
    def user_bytes(self) -> int:
        """Bytes of the user entries in a process's top-level table."""
        return 8 * self.user_entries

    def pages_of(self, shift: int) -> int:
        """Return the number of pages that an entry of this shift maps."""
        return 1 << shift - self.page_shift

    def address(self, entry: int) -> int:
        """Return the physical address in an entry."""
        return entry & self.frame | (entry & self.high) << self.high_shift

    def addresses(self, entries: Words) -> Words:
        """Return the physical address in each entry."""
        addresses: Words = entries & np.uint64(self.frame)
        if self.high:
            high = entries & np.uint64(self.high)
            addresses |= high << np.uint64(self.high_shift)
        return addresses

    def maps_memory(self, entry: int, shift: int) -> bool:
        """Return whether a present entry maps memory rather than points to a table.

        :param shift: Number of address bits below the entry's level.
        """
        return (entry ^ self.flip) & self.leaf_bits(shift) != 0

    def leaf_bits(self, shift: int) -> int:
        """Return the bits any of which marks a present entry that maps memory.

        They are tested after :attr:`flip` is inverted in the entry.
        """
        if shift == self.page_shift:
            return self.present
        return self.huge if shift <= self.largest else 0

    def huge_of(self, entries: Words, shift: int) -> Booleans | None:
        """Return which entries above the lowest level map huge pages, present or not.

        :return: ``None`` if entries of this shift cannot map huge pages.
        """
        if shift > self.largest:
            return None
        huge: Booleans = ((entries ^ np.uint64(self.flip)) & np.uint64(self.huge)) != 0
        if self.flip:
            # The bit is clear in empty entries, too.
            huge &= self.mapped_of(entries)
        return huge

    def present_of(self, entries: Words) -> Booleans:
        """Return which entries are present."""
        present: Booleans = (entries & np.uint64(self.present)) != 0
        return present

    def mapped_of(self, entries: Words) -> Booleans:
        """Return which entries are present, or map an inaccessible page."""
        mapped: Booleans = (entries & np.uint64(self.present | self.protnone)) != 0
        return mapped

    def tables(self, entries: Words, shift: int) -> Words:
        """Return the physical addresses of the tables that entries point to."""
        return self.addresses(entries[self.table_entries(entries, shift)])

    def table_entries(self, entries: Words, shift: int) -> Booleans:
        """Return which entries above the lowest level point to tables."""
        named = self.present_of(entries)
        huge = self.huge_of(entries, shift)
        if huge is not None:
            named &= ~huge
        return named

    def user_pfns(self, entries: Words) -> Words:
        """Return the pfn of the page that each user entry maps."""
        if self.inverts:
            entries = np.where(self.present_of(entries), entries, ~entries)
        return self.addresses(entries) >> np.uint64(self.page_shift)

    def swap_types(self, entries: Words) -> Words:
        """Return the number of the swap device in each swap entry."""
        types: Words = entries >> np.uint64(self.swap_type_shift) & np.uint64(31)
        return types


class TableWalk:
    """Page tables below one top-level table, each read when first needed."""

    def __init__(
        self, form: TableFormat, root: int, read: Callable[[int], bytes]
    ) -> None:
        """
        :param root: Address of the top-level table, as *read* takes it.
        :param read: Reads *root*, or the table at a physical address; may raise
            FaultError.
        """
        self.form = form
        self._root = root
        self._read_table = read
        self._tables: dict[int, bytes] = {}
        self._leaf = {shift: form.leaf_bits(shift) for shift in form.shifts}
        self._last = dict.fromkeys(form.shifts, form.entries - 1)
        self._last[form.shifts[0]] = form.top_entries - 1

    def find(self, address: int) -> tuple[int, int] | None:
        """
        Translate an address.

        :return: The physical address, and the number of bytes up to the end of the
            page; ``None`` if nothing is mapped there.
        :raises FaultError: if a table cannot be read
        """
        entry, shift, error = self._descend(address, self.form.shifts)
        if error is not None:
            raise error
        if not entry:
            return None
        within = address & ((1 << shift) - 1)
        start = self.form.address(entry) >> shift << shift
        return start + within, (1 << shift) - within

    def frames(self, address: int, count: int) -> npt.NDArray[np.int64]:
        """
        Find the page frame number of each of some pages.

        :param address: Address of the first page.
        :param count: Number of pages, at least 1.
        :return: -1 for a page that is not mapped, or whose table cannot be read.
        """
        parts: list[npt.NDArray[np.int64]] = []
        done = 0
        while done < count:
            found = self._frames(address + (done << self.form.page_shift), count - done)
            parts.append(found)
            done += len(found)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _frames(self, address: int, count: int) -> npt.NDArray[np.int64]:
        """Find the frames, up to *count*, that one huge entry or one table maps."""
        form = self.form
        entry, shift, error = self._descend(address, form.shifts[:-1])
        within = (address & ((1 << shift) - 1)) >> form.page_shift
        room = min(count, form.pages_of(shift) - within)
        if error is not None or not entry:
            return np.full(room, -1, np.int64)
        table = form.address(entry)
        if form.maps_memory(entry, shift):
            first = (table >> shift << shift - form.page_shift) + within
            return np.arange(first, first + room, dtype=np.int64)
        # Lowest tables are not cached: there are many, each needed once or twice.
        try:
            entries = np.frombuffer(self._read_table(table), "<u8")
        except UNREADABLE:
            return np.full(room, -1, np.int64)
        words = entries[within : within + room]
        frames = form.addresses(words) >> np.uint64(form.page_shift)
        return np.where(form.present_of(words), frames.astype(np.int64), -1)

    def _descend(
        self, address: int, shifts: tuple[int, ...]
    ) -> tuple[int, int, FaultError | None]:
        """
        Walk down to the entry that maps an address, through tables of these shifts.

        :return: The last entry, 0 if it is not present or could not be read; its shift;
            and the error if it could not be read.
        """
        tables, table, entry, shift = self._tables, self._root, 0, 0
        form = self.form
        present, flip, frame = form.present, form.flip, form.frame
        high, high_shift = form.high, form.high_shift
        for shift in shifts:
            entries = tables.get(table)
            if entries is None:
                try:
                    entries = tables[table] = self._read_table(table)
                except UNREADABLE as error:
                    return 0, shift, error
            index = address >> shift & self._last[shift]
            (entry,) = _U64.unpack_from(entries, index * 8)
            if not entry & present:
                return 0, shift, None
            # form.maps_memory() and address() inlined: calls would double the time.
            if (entry ^ flip) & self._leaf[shift]:
                break
            table = entry & frame | (entry & high) << high_shift
        return entry, shift, None


# --- Properties of an architecture.


KERNEL_HALF_BITS = 63
"""Number of bits of an offset into the kernel's half, on every 64-bit architecture."""


class Piece(NamedTuple):
    """A range of virtual addresses that is physically contiguous."""

    start: int
    size: int
    physical: int

    @classmethod
    def read(cls, start: int, size: int, physical: int) -> "Piece":
        """Return a range whose start and size are from the kernel's variables.

        :raises DamagedDataError: if the range is impossible
        """
        if size < 0 or start + size > _ADDRESSES:
            raise DamagedDataError(f"a map of {size:,} bytes", start)
        return cls(start, size, physical)


_ADDRESSES = 1 << 64


class Arch:
    """An architecture; this base class stands for an unknown one."""

    image: tuple[tuple[str, str], ...] = ()
    """Symbols of the start and end of each part of the kernel's image that stays mapped
    after boot."""

    has_frame_records = False
    """Whether kernel code always makes frame records."""

    saved_registers: tuple[str, ...] = ()
    """Members of ``task_struct`` that hold the registers of a task that is switched
    out: the stack pointer, and others that are not saved on its stack."""

    user_registers: tuple[str, ...] = ()
    """drgn's names of the stack pointer and of the frame pointer; empty if user stacks
    are not read."""

    longest_call = 0
    """Maximum length of a call instruction in bytes, without prefixes."""

    def ends_with_call(self, code: bytes) -> bool:
        """Return whether the last instruction of some user code may be a call."""
        return False

    def address_bits(self, vmcoreinfo: Mapping[str, str]) -> int:
        """
        Return the number of bits of a kernel address that are translated.

        :param vmcoreinfo: Lines of the kernel's VMCOREINFO note.
        """
        return KERNEL_HALF_BITS

    def code_start(self, vmcoreinfo: Mapping[str, str]) -> int:
        """Return an address above the direct map, and not above any code.

        The kernel's image with its static variables, and modules, lie above.
        """
        return 1 << KERNEL_HALF_BITS

    def image_range(self, prog: Program) -> tuple[int, int]:
        """
        Return the virtual start and end of the range with the kernel's image.

        No slab memory and no stack is in it. On x86-64 it has the modules and all else
        above the image's start.

        :return: The end is exclusive; ``(0, 0)`` if unknown.
        """
        return 0, 0

    def table_format(self, prog: Program) -> TableFormat | None:
        """Return the format of a kernel's page tables; ``None`` if unknown."""
        return None

    def image_offset(self, prog: Program) -> int | None:
        """Return virtual minus physical address of the image; ``None`` if unknown."""
        return None

    def direct_map(self, prog: Program) -> Piece | None:
        """
        Return the range where all memory is mapped; ``None`` if unknown.

        :raises MissingError: if the kernel lacks the variables with its bounds
        :raises UNREADABLE: if these cannot be read or are impossible
        """
        return None

    def paged(self, prog: Program, form: TableFormat) -> Iterator[tuple[int, int]]:
        """Yield start and size of the ranges of vmalloc() memory and of modules."""
        return iter(())


# --- x86-64 (Documentation/arch/x86/x86_64/mm.rst).


START_KERNEL_MAP: Final = 0xFFFF_FFFF_8000_0000
"""
Start of the mapping of the kernel's image (__START_KERNEL_map).

All code lies above, including modules: the kernel code model uses the last 2 GiB.
"""

_PAGE_SHIFT = 12
_X86_64_SHIFTS = (39, 30, 21, _PAGE_SHIFT)
_FRAME = 0x000F_FFFF_FFFF_F000

_VMALLOC_TIB = {4: 32, 5: 12800}
"""Size of the vmalloc area by number of levels (VMALLOC_SIZE_TB_L4 and _L5)."""

_MODULES = 0xFFFF_FFFF_A000_0000
MODULES_END = 0xFFFF_FFFF_FF00_0000


class X86(Arch):
    """x86-64, with page tables of four or five levels."""

    # arch/x86/kernel/vmlinux.lds.S: the init sections between them are freed after
    # boot.
    image = (
        ("_stext", "_etext"),
        ("__start_rodata", "__end_rodata"),
        ("_sdata", "__init_begin"),
        ("__bss_start", "__bss_stop"),
    )
    saved_registers = ("thread.sp",)
    user_registers = ("rsp", "rbp")
    longest_call = 7

    def ends_with_call(self, code: bytes) -> bool:
        return ends_with_call(code)

    def address_bits(self, vmcoreinfo: Mapping[str, str]) -> int:
        return 56 if number(vmcoreinfo.get("NUMBER(pgtable_l5_enabled)", "0")) else 47

    def code_start(self, vmcoreinfo: Mapping[str, str]) -> int:
        return START_KERNEL_MAP

    def image_range(self, prog: Program) -> tuple[int, int]:
        return START_KERNEL_MAP, 1 << 64

    def table_format(self, prog: Program) -> TableFormat:
        # With 57 bits of virtual addresses (CONFIG_X86_5LEVEL, in v4.14).
        top = (48,) if vmcoreinfo_number(prog, "pgtable_l5_enabled") else ()
        # With memory encryption (SME), a bit of the address marks encrypted pages.
        encrypted = vmcoreinfo_number(prog, "sme_mask") or 0
        return x86_format((*top, *_X86_64_SHIFTS), encrypted)

    def image_offset(self, prog: Program) -> int | None:
        base = vmcoreinfo_number(prog, "phys_base")
        return None if base is None else START_KERNEL_MAP - base

    def direct_map(self, prog: Program) -> Piece:
        # Without CONFIG_DYNAMIC_MEMORY_LAYOUT the start is a constant, and not found.
        start = find_variable(prog, "page_offset_base").value_()
        size = find_variable(prog, "max_pfn").value_() << _PAGE_SHIFT
        return Piece.read(start, size, 0)

    def paged(self, prog: Program, form: TableFormat) -> Iterator[tuple[int, int]]:
        yield _MODULES, MODULES_END - _MODULES
        with suppress(*LOST):
            # Without CONFIG_DYNAMIC_MEMORY_LAYOUT the start is a constant.
            size = (_VMALLOC_TIB[form.levels] << 40) - 1
            yield find_variable(prog, "vmalloc_base").value_(), size


def x86_format(
    shifts: tuple[int, ...] = _X86_64_SHIFTS, encrypted: int = 0
) -> TableFormat:
    """
    Return the format of x86-64's page tables, by default with four levels.

    The bits are those of arch/x86/include/asm/pgtable_types.h and pgtable_64.h.

    :param encrypted: The bit of an entry that marks encrypted pages.
    """
    return TableFormat(
        shifts=shifts,
        frame=_FRAME & ~encrypted,
        largest=30,
        huge=1 << 7,  # _PAGE_PSE
        protnone=1 << 8,  # _PAGE_PROTNONE
        special=1 << 9,
        hardware=1 << 5 | 1 << 6,
        swap_type_shift=59,
        top_entries=512,
        # The kernel's entries follow.
        user_entries=256,
        kernel_entry=256,
        # Linux kernel commit 6b28baca9b1f ("x86/speculation/l1tf: Protect PROT_NONE
        # PTEs against speculation") (in v4.19)
        inverts=True,
    )


def ends_with_call(code: bytes) -> bool:
    """Return whether the last instruction of some x86-64 code may be a call.

    That is ``call rel32`` (E8), or an indirect ``call`` (FF /2) whose length matches
    its addressing mode.
    """
    if len(code) >= 5 and code[-5] == 0xE8:
        return True
    return any(
        len(code) >= length
        and code[-length] == 0xFF
        and code[1 - length] >> 3 & 0b111 == 2
        and _length(code[1 - length], code[2 - length] if length > 2 else 0) == length
        for length in (2, 3, 4, 6, 7)
    )


def _length(mod_rm: int, sib: int) -> int:
    """Return the length of an instruction with a one-byte opcode, without prefixes."""
    mode, memory = mod_rm >> 6, mod_rm & 0b111
    if mode == 0b11:
        return 2
    has_sib = memory == 0b100
    if mode == 0b00:
        has_disp32 = memory == 0b101 or (has_sib and sib & 0b111 == 0b101)
        return 2 + has_sib + (4 if has_disp32 else 0)
    return 2 + has_sib + (1 if mode == 0b01 else 4)


# --- arm64 (Documentation/arch/arm64/memory.rst; arch/arm64/include/asm/memory.h).


_ALL = (1 << 64) - 1
_LEAST_BITS = {12: 48, 14: 47, 16: 48}
"""VA_BITS_MIN by the shift of a page: bits of addresses with which a kernel built for
52 bits runs if the CPU does not support 52."""

# Arm Architecture Reference Manual, VMSAv8-64 descriptors: above the lowest level, an
# entry with this bit points to a table, and one without it maps memory.
_TABLE = 1 << 1
_SPECIAL = 1 << 56


_CALLS = (
    (0xFC00_0000, 0x9400_0000),  # bl
    (0xFFFF_FC1F, 0xD63F_0000),  # blr
    (0xFEFF_F800, 0xD63F_0800),  # blraa, blrab, blraaz, blrabz
)
"""Masks and values of the call instructions: those that set x30."""


class SoftwareBits(NamedTuple):
    """Bits of entries that Linux defines, and that differ between versions."""

    protnone: int
    """PTE_PROT_NONE, PMD_PRESENT_INVALID: the entry maps a page, but is not valid."""

    swap_type_shift: int


# Since "arm64/mm: Move PTE_PRESENT_INVALID to overlay PTE_NG" (in v6.10)
SOFTWARE = SoftwareBits(1 << 11, 6)
# Since Linux kernel commit 570ef363509b ("arm64/pgtable: support
# __HAVE_ARCH_PTE_SWP_EXCLUSIVE") (in v5.19)
SOFTWARE_5_19 = SoftwareBits(1 << 58 | 1 << 59, 3)
SOFTWARE_OLD = SoftwareBits(1 << 58 | 1 << 59, 2)


class Arm64(Arch):
    """arm64, with pages of 4, 16 or 64 KiB and addresses of up to 52 bits."""

    # arch/arm64/kernel/vmlinux.lds.S
    image = (
        ("_stext", "_etext"),
        ("__start_rodata", "__end_rodata"),
        ("_sdata", "_edata"),
        ("__bss_start", "__bss_stop"),
    )
    has_frame_records = True
    user_registers = ("sp", "x29")
    longest_call = 4
    saved_registers = tuple(f"thread.cpu_context.{name}" for name in ("sp", "fp", "pc"))

    def address_bits(self, vmcoreinfo: Mapping[str, str]) -> int:
        # Since v5.12: a kernel built for 52 bits may run with less.
        control = vmcoreinfo.get("NUMBER(TCR_EL1_T1SZ)")
        bits = 0 if control is None else 64 - number(control)
        bits = bits or _built_bits(vmcoreinfo) or KERNEL_HALF_BITS
        if not 0 < bits < 64:
            raise DamagedDataError(f"addresses of {bits} bits")
        return bits

    def code_start(self, vmcoreinfo: Mapping[str, str]) -> int:
        # _PAGE_END(VA_BITS_MIN), where modules begin: the middle of kernel addresses.
        shift = number(vmcoreinfo.get("PAGESIZE", "4096")).bit_length() - 1
        least = min(_built_bits(vmcoreinfo) or 48, _LEAST_BITS.get(shift, 48))
        return (1 << 64) - (1 << least - 1)

    def ends_with_call(self, code: bytes) -> bool:
        word = int.from_bytes(code[-4:], "little") if len(code) >= 4 else 0
        return any(word & mask == call for mask, call in _CALLS)

    def image_range(self, prog: Program) -> tuple[int, int]:
        try:
            start, end = (find_symbol(prog, name).address for name in ("_text", "_end"))
        except MissingError:
            return 0, 0
        if end < start:
            # drgn may not relocate a symbol of debug info behind all sections (_end).
            end += hex_number(vmcoreinfo(prog).get("KERNELOFFSET", "0"))
        return (start, end) if start < end else (0, 0)

    def table_format(self, prog: Program) -> TableFormat | None:
        lines = vmcoreinfo(prog)
        built, size = _built_bits(lines), lines.get("PAGESIZE")
        if built is None or size is None:
            return None
        page_shift = number(size).bit_length() - 1
        bits = self.address_bits(lines)
        return arm64_format(page_shift, bits, built, _software_bits(prog))

    def image_offset(self, prog: Program) -> int | None:
        return vmcoreinfo_number(prog, "kimage_voffset")

    def direct_map(self, prog: Program) -> Piece | None:
        built = _built_bits(vmcoreinfo(prog))
        zero = vmcoreinfo_number(prog, "PHYS_OFFSET")
        if built is None or zero is None:
            return None
        shift = find_variable(prog, "PAGE_SHIFT").value_()
        first = find_variable(prog, "min_low_pfn").value_() << shift
        end = find_variable(prog, "max_pfn").value_() << shift
        # __phys_to_virt()
        start = first - zero - (1 << built) & _ALL
        return Piece.read(start, end - first, first)

    def paged(self, prog: Program, form: TableFormat) -> Iterator[tuple[int, int]]:
        # Since Linux kernel commit 2369f171d5c5 ("arm64: crash_core: Export MODULES,
        # VMALLOC, and VMEMMAP ranges") (in v6.0).
        for first, last in (
            ("MODULES_VADDR", "MODULES_END"),
            ("VMALLOC_START", "VMALLOC_END"),
        ):
            start = vmcoreinfo_number(prog, first)
            end = vmcoreinfo_number(prog, last)
            if start is not None and end is not None and start < end:
                yield start, end - start


def _built_bits(vmcoreinfo: Mapping[str, str]) -> int | None:
    """Return the bits of virtual addresses that a kernel was built for (VA_BITS).

    :return: ``None`` if VMCOREINFO does not have them.
    :raises DamagedDataError: if their number is impossible
    """
    text = vmcoreinfo.get("NUMBER(VA_BITS)")
    if text is None:
        return None
    bits = number(text)
    if not 0 < bits < 64:
        raise DamagedDataError(f"addresses of {bits} bits")
    return bits


def _software_bits(prog: Program) -> SoftwareBits:
    """Return the bits by the kernel's version, which other changes in it reveal."""
    try:
        # Until Linux kernel commit 5691753d73a2 ("mm: convert huge_zero_page to
        # huge_zero_folio") (in v6.10).
        find_variable(prog, "huge_zero_page")
    except MissingError:
        return SOFTWARE
    try:
        find_constant(prog, "PG_anon_exclusive")
    except MissingError:
        return SOFTWARE_OLD
    return SOFTWARE_5_19


def arm64_format(
    page_shift: int, bits: int, built: int, software: SoftwareBits = SOFTWARE
) -> TableFormat:
    """
    Return the format of arm64's page tables (asm/pgtable-hwdef.h, asm/pgtable-prot.h).

    :param bits: Bits of virtual addresses that are in use.
    :param built: Bits of virtual addresses that the kernel was built for.
    """
    step = page_shift - 3
    shifts = tuple(range(page_shift, bits, step))[::-1]
    frame = (1 << 48) - (1 << page_shift)
    high, high_shift = 0, 0
    if page_shift == 16:
        # FEAT_LPA: bits 51 to 48 of the address; 0 if not in use.
        high, high_shift = 0xF << 12, 36
    elif bits > 48:
        # FEAT_LPA2: bits 51 and 50; without it these bits hold the shareability.
        frame = (1 << 50) - (1 << page_shift)
        high, high_shift = 0b11 << 8, 42
    # The top-level table has room for what the kernel was built for (PTRS_PER_PGD).
    top = 1 << min(step, max(built, bits) - shifts[0])
    return TableFormat(
        shifts=shifts,
        frame=frame,
        high=high,
        high_shift=high_shift,
        # An upper limit: pages of 4 KiB allow blocks of up to 1 GiB (512 GiB with
        # FEAT_LPA2); larger pages, blocks at one or two levels above the lowest.
        largest=shifts[0],
        huge=_TABLE,
        flip=_TABLE,
        protnone=software.protnone,
        special=_SPECIAL,
        swap_type_shift=software.swap_type_shift,
        top_entries=top,
        # Tables of the kernel and of processes are apart (TTBR1 and TTBR0).
        user_entries=top,
        kernel_entry=0,
    )


# --- riscv64 (Documentation/arch/riscv/vm-layout.rst): memory only, no stacks.


_RISCV64_SHIFTS = {39: (30, 21, 12), 48: (39, 30, 21, 12), 57: (48, 39, 30, 21, 12)}
"""Shifts of each level by the bits of virtual addresses: Sv39, Sv48 and Sv57."""

_BELOW_CODE = 0xFFFF_FFFF_0000_0000
"""An address below all code: the kernel's image is in the last 2 GiB, and modules are
within 2 GiB of the image (asm/pgtable.h: KERNEL_LINK_ADDR, MODULES_VADDR)."""

_PAGED = (
    ("VMALLOC_START", "VMALLOC_END"),
    ("MODULES_VADDR", "MODULES_END"),
    ("VMEMMAP_START", "VMEMMAP_END"),
)
"""Lines of VMCOREINFO with first address and end of each range that page tables map
(arch/riscv/kernel/vmcore_info.c)."""


class Riscv64(Arch):
    """riscv64, with pages of 4 KiB."""

    image = (
        ("_stext", "_etext"),
        ("__start_rodata", "__end_rodata"),
        ("_sdata", "_edata"),
        ("__bss_start", "__bss_stop"),
    )

    def address_bits(self, vmcoreinfo: Mapping[str, str]) -> int:
        bits = vmcoreinfo.get("NUMBER(VA_BITS)")
        # VA_BITS counts the addresses of both halves.
        return KERNEL_HALF_BITS if bits is None else number(bits) - 1

    def code_start(self, vmcoreinfo: Mapping[str, str]) -> int:
        return _BELOW_CODE

    def table_format(self, prog: Program) -> TableFormat | None:
        bits = number(vmcoreinfo(prog).get("NUMBER(VA_BITS)", "0"))
        return riscv64_format(bits) if bits in _RISCV64_SHIFTS else None

    def image_offset(self, prog: Program) -> int | None:
        return vmcoreinfo_number(prog, "va_kernel_pa_offset")

    def direct_map(self, prog: Program) -> Piece | None:
        start = vmcoreinfo_number(prog, "PAGE_OFFSET")
        first = vmcoreinfo_number(prog, "phys_ram_base")
        if start is None or first is None:
            return None
        end = find_variable(prog, "max_pfn").value_() << _PAGE_SHIFT
        return Piece.read(start & _ALL, end - first, first)

    def paged(self, prog: Program, form: TableFormat) -> Iterator[tuple[int, int]]:
        for first, last in _PAGED:
            start = vmcoreinfo_number(prog, first)
            end = vmcoreinfo_number(prog, last)
            if start is not None and end is not None and start < end:
                yield start, end - start


def riscv64_format(bits: int) -> TableFormat:
    """Return the format of riscv64's page tables (asm/pgtable-64.h, pgtable-bits.h).

    :param bits: Bits of virtual addresses: 39, 48 or 57.
    """
    return TableFormat(
        shifts=_RISCV64_SHIFTS[bits],
        # The page frame number is in bits 10 to 53.
        frame=0,
        high=(1 << 54) - (1 << 10),
        high_shift=2,
        # An entry of any level that can be read, written or executed maps memory.
        largest=_RISCV64_SHIFTS[bits][0],
        huge=0b1110,
        protnone=1 << 5,  # _PAGE_PROT_NONE
        special=1 << 8,
        swap_type_shift=7,
        top_entries=512,
        # The kernel's entries follow.
        user_entries=256,
        kernel_entry=256,
    )


# --- The architectures by drgn's names: a new one is a class above, and a line here.


_ARCHITECTURES = {
    drgn.Architecture.X86_64: X86(),
    drgn.Architecture.AARCH64: Arm64(),
    drgn.Architecture.RISCV64: Riscv64(),
}
_UNKNOWN = Arch()


def arch_of(prog: drgn.Program) -> Arch:
    """Return the architecture of a program."""
    platform = prog.platform
    return _UNKNOWN if platform is None else architecture(platform.arch)


def architecture(arch: drgn.Architecture) -> Arch:
    """Return drgn's architecture as one of this module; the base class if unknown."""
    return _ARCHITECTURES.get(arch, _UNKNOWN)


def table_format(prog: drgn.Program) -> TableFormat | None:
    """Return the format of a kernel's page tables; ``None`` if unknown."""
    return arch_of(prog).table_format(prog)
