# SPDX-License-Identifier: LGPL-2.1-or-later

"""Interface of observers of the memmap scan."""

from typing import Generic, Protocol, TypeVar

from msatools.memory.pages.classify import Block

T = TypeVar("T")
Same = TypeVar("Same", bound="Observer")


class Observer(Protocol):
    """
    Sums up something over all struct pages of a scan.

    An observer is plain data: a worker of the scan has a copy for each part of the
    memmap, and sends the copy back. So it must be picklable, hold no program, and not
    read from the kernel.
    """

    def observe(self, block: Block) -> None:
        """
        Add a block whose classes are final: those of the report's table.

        Blocks come in pfn order. Do not keep them or views of their arrays.
        """

    def merge(self: Same, later: Same) -> None:
        """Add the sums of another observer; all its blocks have higher pfns."""


class Shared(Generic[T]):
    """
    Constant data of an observer, such as a table made before the scan.

    Copies of the observer share it, and workers do not send it back.
    """

    def __init__(self, value: T) -> None:
        self.value = value

    def __deepcopy__(self, memo: object) -> "Shared[T]":
        return self

    def __reduce__(self) -> tuple[type["Shared[None]"], tuple[None]]:
        return Shared, (None,)
