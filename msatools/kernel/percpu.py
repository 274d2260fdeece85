# SPDX-License-Identifier: LGPL-2.1-or-later

"""Where each CPU has its variables (include/linux/percpu-defs.h, mm/percpu.c)."""

from dataclasses import dataclass, field

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.percpu import per_cpu_ptr

from msatools.kernel.cpumask import possible_cpus
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses
from msatools.kernel.report import LossLog

_WORD = (1 << 64) - 1


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
            self._pointers[name] = self.prog[name].address_
        return self.at(self._pointers[name])

    def at(self, pointer: int) -> Addresses:
        """Tell where each CPU has what a per-CPU *pointer* points to; NULL is NULL."""
        if not pointer:
            return np.zeros(len(self.cpus), np.uint64)
        return self.offsets + np.uint64(pointer)


def read_percpu(prog: drgn.Program, findings: LossLog) -> PerCpu:
    """Find the variables of all CPUs; a CPU whose are not found costs a note."""
    null = drgn.Object(prog, prog.pointer_type(prog.type("int")), 0)
    offsets: dict[int, int] = {}
    for cpu in possible_cpus(prog, findings):
        try:
            offsets[cpu] = per_cpu_ptr(null, cpu).value_() & _WORD
        except drgn.FaultError as error:
            findings.lose(Loss.CPUS, f"the variables of CPU {cpu} are lost: {error}")
    return PerCpu(
        prog,
        np.array(list(offsets), np.int64),
        np.array(list(offsets.values()), np.uint64),
    )
