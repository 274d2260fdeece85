# SPDX-License-Identifier: LGPL-2.1-or-later

"""Where each CPU has its variables (include/linux/percpu-defs.h, mm/percpu.c)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.cpumask import possible_cpus
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.selfdesc.variables import find_variable

_WORD = 8
"""Bytes of an offset, an unsigned long."""


@dataclass(frozen=True)
class PerCpu:
    """The CPUs that can ever be online, and where their variables are."""

    prog: drgn.Program
    cpus: npt.NDArray[np.int64]
    """Their numbers, ascending."""

    offsets: Addresses
    """By how much the variables of each are away from per-CPU pointers."""

    _pointers: dict[str, int] = field(default_factory=dict, repr=False, compare=False)
    """Of variables that were asked for, by name: they stay where they are."""

    def addresses(self, name: str) -> Addresses:
        """Tell where each CPU has the per-CPU variable *name*.

        :raises LookupError: if there is none
        """
        if name not in self._pointers:
            self._pointers[name] = find_variable(self.prog, name).address_
        return self.at(self._pointers[name])

    def at(self, pointer: int) -> Addresses:
        """Tell where each CPU has what a per-CPU *pointer* points to; NULL is NULL."""
        if not pointer:
            return np.zeros(len(self.cpus), np.uint64)
        return self.offsets + np.uint64(pointer)


def read_percpu(reader: Reader, losses: LossLog) -> PerCpu:
    """Find the variables of all CPUs, which is done once.

    A CPU whose are not found costs a note.
    """
    return reader.once(PerCpu, lambda: _read(reader.prog, losses))


def unit_offsets(reader: Reader, cpus: Sequence[int]) -> list[int]:
    """Return how far into a chunk of the percpu allocator each CPU's unit is, in bytes.

    :raises LookupError: if nothing tells it
    :raises drgn.FaultError: if it cannot be read
    """
    array = find_variable(reader.prog, "pcpu_unit_offsets").value_()
    return _chosen(reader.words(array, max(cpus, default=-1) + 1), cpus)


def _read(prog: drgn.Program, losses: LossLog) -> PerCpu:
    reader = Reader(prog)  # as for the CPUs themselves, no report has its reads
    cpus = list(possible_cpus(prog, losses))
    if not cpus:
        return _percpu(prog, {})
    try:
        array = find_variable(prog, "__per_cpu_offset").address_
    except LookupError:  # without SMP, variables are where pointers point to
        return _percpu(prog, dict.fromkeys(cpus, 0))
    try:
        words = reader.words(array, max(cpus, default=-1) + 1)
        return _percpu(prog, dict(zip(cpus, _chosen(words, cpus), strict=True)))
    except drgn.FaultError:
        pass  # some of them may be there
    offsets: dict[int, int] = {}
    for cpu in cpus:
        try:
            (offsets[cpu],) = reader.words(array + _WORD * cpu, 1).tolist()
        except drgn.FaultError as error:
            losses.lose(Loss.CPUS, f"the variables of CPU {cpu} are lost: {error}")
    return _percpu(prog, offsets)


def _chosen(words: Addresses, cpus: Sequence[int]) -> list[int]:
    chosen: list[int] = words[list(cpus)].tolist()
    return chosen


def _percpu(prog: drgn.Program, offsets: dict[int, int]) -> PerCpu:
    return PerCpu(
        prog,
        np.array(list(offsets), np.int64),
        np.array(list(offsets.values()), np.uint64),
    )
