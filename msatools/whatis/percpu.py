# SPDX-License-Identifier: LGPL-2.1-or-later

"""Places in per-CPU memory: variables, and memory of the percpu allocator.

mm/percpu.c: a chunk has a unit for each CPU, all with the same layout.
"""

from functools import cached_property

import numpy as np

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import read_percpu
from msatools.memory.owners.percpu import PercpuUnits, percpu_units
from msatools.selfdesc.find import drgn_lookups
from msatools.target.model import Address
from msatools.whatis.lookup import Lookup
from msatools.whatis.model import PerCpuPlace

_U64 = (1 << 64) - 1


class PerCpuPlaces:
    """Finds places in per-CPU memory."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    def find(self, address: int) -> PerCpuPlace | None:
        """Return the place of an address; ``None`` if it is not in per-CPU memory."""
        known = self._lookup.variables.of_cpu(address)
        if known is not None:
            cpu, linked = known
            return self._variable(cpu, linked)
        units = self._units
        found = None if units is None else units.find(address)
        if found is None:
            return None
        cpu, place = found
        pointer = (address - self._offset(cpu)) & _U64
        piece = place.chunk.piece(place.offset)
        if piece is None:
            return PerCpuPlace(
                cpu=cpu,
                variable=None,
                offset=0,
                pointer=Address(pointer),
                bytes=None,
                allocated=None,
            )
        return PerCpuPlace(
            cpu=cpu,
            variable=None,
            offset=place.offset - piece.start,
            pointer=Address(pointer),
            bytes=piece.bytes,
            allocated=piece.allocated,
        )

    def of_linked(self, address: int) -> PerCpuPlace | None:
        """Return the variable at an address of the kernel's image that it is linked at.

        On arm64, and on x86-64 since v6.15, that is its per-CPU pointer: what lies in
        the image was copied for each CPU, and freed.

        :return: ``None`` if there is none, or the kernel runs on one CPU without SMP.
        """
        percpu = read_percpu(self._lookup.reader, self._lookup.losses)
        return self._variable(None, address) if percpu.offsets.any() else None

    def of_pointer(self, pointer: int) -> PerCpuPlace | None:
        """Return what a per-CPU pointer is of; ``None`` if it is no such pointer."""
        variable = self._variable(None, pointer)
        percpu = read_percpu(self._lookup.reader, self._lookup.losses)
        if variable is not None or not len(percpu.offsets) or self._units is None:
            return variable
        address = (pointer + int(percpu.offsets[0])) & _U64
        found = self._units.find(address)
        piece = None if found is None else found[1].chunk.piece(found[1].offset)
        if found is None or piece is None or not piece.allocated:
            return None
        return PerCpuPlace(
            cpu=None,
            variable=None,
            offset=found[1].offset - piece.start,
            pointer=Address(pointer),
            bytes=piece.bytes,
            allocated=True,
        )

    def _variable(self, cpu: int | None, linked: int) -> PerCpuPlace | None:
        symbol = self._lookup.variables.per_cpu(linked)
        if symbol is None and cpu is None:
            return None
        return PerCpuPlace(
            cpu=cpu,
            variable=None if symbol is None else symbol.name,
            offset=0 if symbol is None else linked - symbol.address,
            pointer=Address(linked),
            bytes=None,
            allocated=None,
        )

    def _offset(self, cpu: int) -> int:
        percpu = read_percpu(self._lookup.reader, self._lookup.losses)
        (row,) = np.flatnonzero(percpu.cpus == cpu)
        return int(percpu.offsets[row])

    @cached_property
    def _units(self) -> PercpuUnits | None:
        try:
            with drgn_lookups:
                return percpu_units(self._lookup.reader, self._lookup.losses)
        except MissingError:
            return None
        except UNREADABLE as error:
            text = f"cannot read the memory of CPUs: {error}"
            self._lookup.losses.lose(Loss.VARIABLES, text)
            return None
