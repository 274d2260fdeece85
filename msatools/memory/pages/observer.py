# SPDX-License-Identifier: LGPL-2.1-or-later

"""Observers of the scan of the memmap."""

from typing import Generic, Protocol, TypeVar

from msatools.memory.pages.classify import Block

T = TypeVar("T")
Same = TypeVar("Same", bound="Observer")


class Observer(Protocol):
    """
    Sums something up over all struct pages of a scan.

    It is plain data: a worker of the scan has a copy of its own for each part of the
    memmap, and what that saw travels back. So it must be picklable, hold no program,
    and read nothing of the kernel.
    """

    def observe(self, block: Block) -> None:
        """
        Look at a block whose classes are final: those of the report's table.

        Blocks come in pfn order. They must not be kept, nor views of their arrays.
        """

    def merge(self: Same, later: Same) -> None:
        """Add what another one saw, all of it at higher pfns."""


class Shared(Generic[T]):
    """
    What an observer looks up and never changes, such as a table made before the scan.

    Copies of the observer share it, and it does not travel back: a merge has its own.
    """

    def __init__(self, value: T) -> None:
        self.value = value

    def __deepcopy__(self, memo: object) -> "Shared[T]":
        return self

    def __reduce__(self) -> tuple[type["Shared[None]"], tuple[None]]:
        return Shared, (None,)
