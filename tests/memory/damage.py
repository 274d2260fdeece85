# SPDX-License-Identifier: LGPL-2.1-or-later

"""Damage a dump's memory for one test, and restore it."""

from collections.abc import Iterator
from functools import cache

from drgn import FaultError, Object, Program, sizeof
from drgn.helpers.linux.slab import slab_object_info

from fixtures import lab
from tests.support.dumps import open_dump
from tests.support.overlay import lay_over

PAGE = 4096


def struct_page(prog: Program, pfn: int, member: str) -> int:
    """Return the address of a member of a struct page."""
    page = prog.type("struct page")
    base: int = prog["vmemmap_base"].value_()
    return base + pfn * sizeof(page) + page.member(member).offset


class Patient:
    """
    A program whose memory one test after the other damages.

    Opening a dump takes longer than reading it. So after each test, :meth:`mend`
    restores the memory and the program's cache.
    """

    def __init__(self, name: str, types: str) -> None:
        self.run = lab.build(name)
        self.prog = open_dump(name, types)
        self._whole = Program()
        self._whole.set_core_dump(self.run.elf)
        self._known = dict(self.prog.cache)
        self._damaged: set[tuple[int, int, bool]] = set()

    def _replace(
        self, start: int, data: bytes | None, physical: bool, size: int = PAGE
    ) -> None:
        def read(address: int, count: int, offset: int, physical: bool) -> bytes:
            if data is None:
                raise FaultError("lost in this test", address)
            return data[offset : offset + count]

        self._damaged.add((start, size, physical))
        lay_over(self.prog, start, size, read, physical)

    def lose(self, address: int, physical: bool = False) -> None:
        """Make the page of an address unreadable."""
        self._replace(address & -PAGE, None, physical)

    def lose_range(self, address: int, size: int) -> None:
        """Make memory of the dump unreadable."""
        self._replace(address, None, False, size)

    def lose_only(self, object_: Object) -> None:
        """Make an object unreadable, but not what else is on its page.

        A type can have room for more than is allocated, as ``struct kmem_cache`` has
        for the nodes that the machine lacks: other objects lie there.
        """
        address = object_.address_
        assert address is not None
        found = slab_object_info(self.prog, address)
        assert found is not None
        end = found.address + found.slab_cache.object_size.value_()
        self._replace(address, None, False, min(sizeof(object_), end - address))

    def poke(
        self, address: int, value: int, size: int = 8, physical: bool = False
    ) -> None:
        """Overwrite memory at an address, within a page."""
        start = address & -PAGE
        page = bytearray(self.prog.read(start, PAGE, physical))
        page[address - start : address - start + size] = value.to_bytes(size, "little")
        self._replace(start, bytes(page), physical)

    def poke_member(self, member: Object, value: int) -> None:
        """Overwrite a member of a structure, in its size."""
        address = member.address_
        assert address is not None
        self.poke(address, value, sizeof(member))

    def mend(self) -> None:
        for start, size, physical in [*self._damaged]:
            data = self._whole.read(start, size, physical)
            self._replace(start, data, physical, size)
        self._damaged.clear()
        self.prog.cache.clear()
        self.prog.cache.update(self._known)


@cache
def patient(name: str, types: str = "dwarf") -> Patient:
    """Return a dump to damage, opened once."""
    return Patient(name, types)


def to_damage(name: str, types: str = "dwarf") -> Iterator[Patient]:
    """Yield a dump for one test, and mend it."""
    found = patient(name, types)
    yield found
    found.mend()
