# SPDX-License-Identifier: LGPL-2.1-or-later

"""Replace memory of a dump, as if it were missing or damaged."""

from collections.abc import Callable

from drgn import FaultError, Object, Program, sizeof

from msatools.program.linear import forget_direct_map

PAGE = 4096


def lay_over(
    prog: Program,
    address: int,
    size: int,
    read: Callable[[int, int, int, bool], bytes],
    physical: bool = False,
) -> None:
    """Read memory at an address with *read*, also for existing readers."""
    prog.add_memory_segment(address, size, read, physical)
    forget_direct_map(prog)


def lose(prog: Program, address: int, size: int, physical: bool = False) -> None:
    """Make memory of a dump unreadable."""

    def fault(address: int, count: int, offset: int, physical: bool) -> bytes:
        raise FaultError("lost in this test", address)

    lay_over(prog, address, size, fault, physical)


def lose_page(prog: Program, address: int) -> None:
    """Make the page of an address unreadable."""
    lose(prog, address & -PAGE, PAGE)


def put(prog: Program, address: int, data: bytes, physical: bool = False) -> None:
    """Replace memory of a dump by other data."""

    def read(_: int, count: int, offset: int, physical: bool) -> bytes:
        return data[offset : offset + count]

    lay_over(prog, address, len(data), read, physical)


def overwrite(member: Object, value: int) -> None:
    """Replace a member of a structure, in its size."""
    assert member.address_ is not None
    data = value.to_bytes(sizeof(member), "little")
    put(member.prog_, member.address_, data)
