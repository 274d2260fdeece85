# SPDX-License-Identifier: LGPL-2.1-or-later

"""Addresses of per-CPU variables (include/linux/percpu-defs.h, mm/percpu.c)."""

from collections.abc import Sequence

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.cpumask import possible_cpus
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.selfdesc.find import find_variable

_OFFSET_BYTES = 8
"""Bytes of an element of ``__per_cpu_offset``, an unsigned long."""


class PerCpu(Struct, frozen=True):
    """The CPUs that can ever be online, and the offsets of their variables."""

    prog: drgn.Program
    cpus: npt.NDArray[np.int64]
    """IDs of the CPUs, ascending."""

    offsets: Addresses
    """Offset of each CPU's variables from per-CPU pointers (``__per_cpu_offset``)."""

    _pointers: dict[str, int] = field(default_factory=dict)
    """Per-CPU pointers of the variables looked up so far, by name."""

    def addresses(self, name: str) -> Addresses:
        """Return the address of the per-CPU variable *name* on each CPU.

        :raises MissingError: if there is no such variable
        """
        if name not in self._pointers:
            self._pointers[name] = find_variable(self.prog, name).address_
        return self.at(self._pointers[name])

    def at(self, pointer: int) -> Addresses:
        """Return the address of a per-CPU *pointer* on each CPU; NULL for NULL."""
        if not pointer:
            return np.zeros(len(self.cpus), np.uint64)
        return self.offsets + np.uint64(pointer)


def read_percpu(reader: Reader, losses: LossLog) -> PerCpu:
    """Find the offsets of all CPUs, once per reader.

    A CPU whose offset cannot be read costs a note, and is left out.
    """
    return reader.once(PerCpu, lambda: _read(reader.prog, losses))


def unit_offsets(reader: Reader, cpus: Sequence[int]) -> list[int]:
    """Return the offset in bytes of each CPU's unit in a chunk of the percpu allocator.

    :raises MissingError: if the kernel lacks ``pcpu_unit_offsets``
    :raises drgn.FaultError: if it cannot be read
    """
    array = find_variable(reader.prog, "pcpu_unit_offsets").value_()
    return _elements(reader.words(array, max(cpus, default=-1) + 1), cpus)


def _read(prog: drgn.Program, losses: LossLog) -> PerCpu:
    # Its reads count for no report, as those of possible_cpus().
    reader = Reader(prog)
    cpus = list(possible_cpus(prog, losses))
    if not cpus:
        return _percpu(prog, {})
    try:
        array = find_variable(prog, "__per_cpu_offset").address_
    except MissingError:  # without SMP, per-CPU pointers are plain addresses
        return _percpu(prog, dict.fromkeys(cpus, 0))
    try:
        words = reader.words(array, max(cpus, default=-1) + 1)
        return _percpu(prog, dict(zip(cpus, _elements(words, cpus), strict=True)))
    except UNREADABLE:
        pass  # some of them may be readable
    offsets: dict[int, int] = {}
    for cpu in cpus:
        try:
            (offsets[cpu],) = reader.words(array + _OFFSET_BYTES * cpu, 1).tolist()
        except UNREADABLE as error:
            losses.lose(Loss.CPUS, f"cannot read the variables of CPU {cpu}: {error}")
    return _percpu(prog, offsets)


def _elements(words: Addresses, cpus: Sequence[int]) -> list[int]:
    elements: list[int] = words[list(cpus)].tolist()
    return elements


def _percpu(prog: drgn.Program, offsets: dict[int, int]) -> PerCpu:
    return PerCpu(
        prog,
        np.array(list(offsets), np.int64),
        np.array(list(offsets.values()), np.uint64),
    )
