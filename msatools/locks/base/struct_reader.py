# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads members of structures; each member and symbol is looked up once."""

import struct
from functools import cached_property, lru_cache
from typing import NamedTuple

import drgn
import numpy as np
import numpy.typing as npt

from msatools.errors import MissingError
from msatools.kernel.reader import Reader
from msatools.kernel.strings import decode_string
from msatools.kernel.structs import find_member, integer_format
from msatools.kernel.words import PAGE, U64
from msatools.selfdesc.find import find_constant, find_type
from msatools.selfdesc.vmcoreinfo import number, vmcoreinfo
from msatools.target.addresses import code_start, kernel_start
from msatools.target.arch import arch_of
from msatools.tasks.text import kernel_symbol

_ERRORS = (1 << 64) - 4096
"""Where error codes begin that look like addresses (MAX_ERRNO)."""

_END_OF_MODULES = 0xFFFF_FFFF_FF00_0000
"""End of the code of modules on x86-64."""

_MODULES = {
    "journal_s": "jbd2",
    "mapped_device": "dm_mod",
    "dm_table": "dm_mod",
    "dm_target": "dm_mod",
    "target_type": "dm_mod",
    "dm_io": "dm_mod",
    "delay_c": "dm_delay",
    "dm_delay_info": "dm_delay",
    "loop_device": "loop",
    "nbd_device": "nbd",
    "nbd_config": "nbd",
    "nbd_sock": "nbd",
    "xfs_buf": "xfs",
    "xlog_in_core": "xfs",
    "xlog": "xfs",
    "xfs_cil": "xfs",
    "xfs_buftarg": "xfs",
    "btrfs_fs_info": "btrfs",
    "btrfs_fs_devices": "btrfs",
    "btrfs_device": "btrfs",
    "extent_buffer": "btrfs",
    "btrfs_transaction": "btrfs",
    "btrfs_root": "btrfs",
    "nfs_server": "nfs",
    "rpc_clnt": "sunrpc",
    "rpc_task": "sunrpc",
    "rpc_xprt": "sunrpc",
}
"""Structures of parts of the kernel that may be modules, by name, and the module."""


class _MemberBlock(NamedTuple):
    """Members of a structure that are read together."""

    start: int
    """Offset of the first member."""

    size: int
    """Bytes from there to the end of the last member."""

    values: tuple[tuple[struct.Struct, int], ...]
    """Format of each member, and its offset from *start*."""


class Layout:
    """Offsets and values of members of structures, and addresses of symbols."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._prog = reader.prog
        self.kernel_start = kernel_start(reader.prog)
        self.code_start = code_start(reader.prog)
        self._image = arch_of(reader.prog).image_range(reader.prog)
        self._member = lru_cache(maxsize=None)(self._find_member)
        self._block = lru_cache(maxsize=None)(self._find_block)
        self._size = lru_cache(maxsize=None)(self._find_size)
        self._symbol = lru_cache(maxsize=None)(self._find_symbol)
        self._flag = lru_cache(maxsize=None)(self._find_flag)

    @cached_property
    def page_size(self) -> int:
        """Size of a page."""
        return number(vmcoreinfo(self._prog).get("PAGESIZE", str(PAGE)))

    def data_pointers(self, words: npt.NDArray[np.uint64]) -> list[int]:
        """Return the words that may be addresses of data, in order, no duplicates."""
        start, end = (np.uint64(min(each, _ERRORS)) for each in self._image)
        chosen = (words >= np.uint64(self.kernel_start)) & (words < np.uint64(_ERRORS))
        data = words[chosen & ((words < start) | (words >= end))]
        return list(dict.fromkeys(data.tolist()))

    def is_data(self, address: int) -> bool:
        """Return whether an address may be of data outside of the kernel's image."""
        start, end = self._image
        return self.kernel_start <= address < _ERRORS and not start <= address < end

    def is_low_code(self, low: int) -> bool:
        """Return whether a number may be the low 32 bits of an address of code.

        On arm64 that of modules is not known.
        """
        start, end = self._image
        return (low - start) % (1 << 32) < min(end, _END_OF_MODULES) - start

    def offset(self, type_name: str, *members: str) -> int:
        """Return the offset of a member.

        :param members: Names that it may have, the newest first.
        :raises MissingError: if the structure has none of them, or its type is unknown
        """
        return int(self._require(type_name, members).address_)

    def has(self, type_name: str, *members: str) -> bool:
        """Return whether a structure has any of some members."""
        return self._member(type_name, members) is not None

    def size(self, type_name: str) -> int:
        """Return the size of a structure.

        :raises MissingError: if the type is unknown
        """
        return self._size(type_name)

    def symbol(self, name: str) -> int | None:
        """Return the address of a function or variable; ``None`` if unknown."""
        return self._symbol(name)

    def flag(self, name: str) -> int:
        """Return the value of an enumerator; 0 if this kernel has none of that name."""
        return self._flag(name)

    def word(self, address: int) -> int:
        """Read a pointer or other u64.

        :raises drgn.FaultError: if it cannot be read
        """
        value: int = U64.unpack(self.reader.read(address, 8))[0]
        return value

    def member(self, address: int, type_name: str, *members: str) -> int:
        """Read a member of a structure, with the size and sign of its type.

        If the member is a structure or an array, its first integer or pointer is read.
        An ``atomic_long_t`` is signed, even if the kernel keeps flags or a pointer in
        it.

        :param members: Names that it may have, the newest first.
        :raises drgn.FaultError: if it cannot be read
        :raises MissingError: if the structure has none of the members
        """
        return self._read(address, self._block(type_name, (members,)))[0]

    def members(
        self, address: int, type_name: str, *wanted: tuple[str, ...] | str
    ) -> tuple[int, ...]:
        """Read several members of a structure with one read: see :meth:`member`.

        :param wanted: Each member's name, or the names that it may have.
        :raises drgn.FaultError: if they cannot be read
        :raises MissingError: if the structure lacks one
        """
        return self._read(address, self._block(type_name, wanted))

    def _read(self, address: int, block: _MemberBlock) -> tuple[int, ...]:
        data = self.reader.read(address + block.start, block.size)
        return tuple(
            format_.unpack_from(data, offset)[0] for format_, offset in block.values
        )

    def text(self, address: int, type_name: str, *members: str) -> str:
        """Read an array of characters in a structure.

        :raises drgn.FaultError: if it cannot be read
        :raises MissingError: if the structure has none of the members
        """
        member = self._require(type_name, members)
        start = address + member.address_
        return decode_string(self.reader.read(start, drgn.sizeof(member)))

    def _find_member(
        self, type_name: str, members: tuple[str, ...]
    ) -> drgn.Object | None:
        try:
            return find_member(self._type(type_name), members)
        except MissingError:
            return None

    def _require(self, type_name: str, members: tuple[str, ...]) -> drgn.Object:
        """Return a member of a structure at address 0.

        :raises MissingError: if the structure has none of the members
        """
        member = self._member(type_name, members)
        if member is None:
            raise MissingError(f"struct {type_name} has no {' or '.join(members)}")
        return member

    def _find_block(
        self, type_name: str, wanted: tuple[tuple[str, ...] | str, ...]
    ) -> _MemberBlock:
        members = []
        for names in wanted:
            candidates = (names,) if isinstance(names, str) else names
            member = self._require(type_name, candidates)
            members.append((integer_format(member), int(member.address_)))
        start = min(offset for _, offset in members)
        end = max(offset + format_.size for format_, offset in members)
        values = tuple((format_, offset - start) for format_, offset in members)
        return _MemberBlock(start, end - start, values)

    def _find_size(self, type_name: str) -> int:
        size: int = drgn.sizeof(self._type(type_name))
        return size

    def _type(self, type_name: str) -> drgn.Type:
        name = f"struct {type_name}"
        try:
            return find_type(self._prog, name)
        except MissingError:
            if type_name not in _MODULES:
                raise
            return find_type(self._prog, name, _MODULES[type_name])

    def _find_flag(self, name: str) -> int:
        try:
            return int(find_constant(self._prog, name).value_())
        except MissingError:
            return 0

    def _find_symbol(self, name: str) -> int | None:
        try:
            return kernel_symbol(self._prog, name)
        except MissingError:
            return None
