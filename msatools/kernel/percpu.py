# SPDX-License-Identifier: LGPL-2.1-or-later

"""CPU masks, per-CPU variables, and sums of per-CPU counters."""

from collections.abc import Callable, Container, Iterable, Sequence
from functools import lru_cache

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from msatools.errors import UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.reader import PAGE, Addresses, Reader
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import lose_many
from msatools.program.model import TargetError
from msatools.reports.units import ranges
from msatools.selfdesc.find import find_type, find_variable

# --- Sets of CPUs: struct cpumask, one or many (include/linux/cpumask.h).
#
# The kernel's own masks of its CPUs (kernel/cpu.c) are read by name. drgn's helpers
# that loop over CPUs trust nr_cpu_ids even if it is damaged.


_POSSIBLE = "msatools.possible CPUs"
"""Key of the possible CPUs in ``prog.cache``."""

Masks = npt.NDArray[np.bool_]
"""One row per mask, one column per CPU ID."""

Cpus = tuple[int, ...]
"""IDs of CPUs, ascending."""


class NoSuchCpuError(TargetError):
    """A requested CPU does not exist."""


def require_cpus(cpus: Iterable[int], there: Container[int]) -> None:
    """Make sure that all requested CPUs exist.

    :param there: The CPUs of the kernel.
    :raises NoSuchCpuError: if some do not exist
    """
    if missing := sorted(cpu for cpu in cpus if cpu not in there):
        raise NoSuchCpuError(
            f"CPU {ranges(missing)}",
            "this kernel has none of that number",
            "list all without -P",
        )


def possible_cpus(prog: drgn.Program, losses: LossLog) -> Cpus:
    """
    Return all CPUs that can ever be online; none, with a note, if the mask is lost.

    The mask is fixed at boot, and read once per program.
    """
    known: Cpus | None = prog.cache.get(_POSSIBLE)
    if known is None:
        try:
            known = mask_at(Reader(prog), _kept_address(prog, "possible"))
        except UNREADABLE as error:
            losses.lose(Loss.CPUS, f"cannot read the list of CPUs: {error}")
            return ()
        prog.cache[_POSSIBLE] = known
    return known


def online_cpus(reader: Reader, losses: LossLog) -> Cpus:
    """Read which CPUs are online, or were until the kernel crashed.

    :raises MissingError: if the type of a mask is unknown
    """
    masks = _masks_at_once(reader, "online", "active")
    if masks is not None:
        return with_stopped(*masks)
    online = kept_mask(reader, "online", losses) or ()
    return with_stopped(online, kept_mask(reader, "active", losses) or ())


def with_stopped(online: Cpus, active: Cpus) -> Cpus:
    """Return the CPUs that are online, and those that were until the kernel panicked.

    A panic without kdump, and with newer kernels of arm64 also one with kdump, clears
    the online bit of each CPU that is stopped (stop_this_cpu(), ipi_cpu_crash_stop()),
    not its active bit. A CPU that is unplugged becomes inactive before it is offline.
    """
    return online if online == active else tuple(sorted({*online, *active}))


def kept_mask(reader: Reader, name: str, losses: LossLog) -> Cpus | None:
    """Read one of the kernel's own masks; ``None``, with a note, if it is lost.

    :param name: ``possible``, ``present``, ``online`` or ``active``.
    :raises MissingError: if its type is unknown
    """
    address = reader.once((kept_mask, name), lambda: _kept_address(reader.prog, name))
    return try_mask(reader, lambda: address, f"the mask of {name} CPUs", losses)


def _masks_at_once(reader: Reader, *names: str) -> tuple[Cpus, ...] | None:
    """Read some of the kernel's own masks with one read; ``None`` if it fails.

    The masks lie side by side (kernel/cpu.c), and each query of one thread reads them.

    :raises MissingError: if the masks' type is unknown
    """
    places = reader.once(
        (_masks_at_once, names),
        lambda: [_kept_address(reader.prog, name) for name in names],
    )
    start, end = min(places), max(places)
    try:
        count = _id_count(reader)
        size = _bytes_for(count)
        if end - start > PAGE:
            return None
        data = reader.read(start, end - start + size)
    except UNREADABLE:
        return None
    return tuple(
        _cpus_in(data[place - start : place - start + size], count) for place in places
    )


def _kept_address(prog: drgn.Program, name: str) -> int:
    address: int = find_variable(prog, f"__cpu_{name}_mask").address_
    return address


def try_mask(
    reader: Reader, place: Callable[[], int], what: str, losses: LossLog
) -> Cpus | None:
    """Read a mask; ``None``, with a note, if it cannot be read.

    :param place: Returns the mask's address; 0 if none is allocated, an empty mask.
    :param what: What the mask is called in the note.
    """
    try:
        address = place()
        return mask_at(reader, address) if address else ()
    except UNREADABLE as error:
        losses.lose(Loss.MASKS, f"cannot read {what}: {error}", about=what)
        return None


def place_of(mask: drgn.Object) -> int:
    """Return the address of a ``cpumask_var_t``'s mask; 0 if it is not allocated.

    The object is a pointer or, without CONFIG_CPUMASK_OFFSTACK, the mask itself.
    """
    if is_pointer(mask.type_):
        return int(mask.value_())
    address: int = mask.address_
    return address


def is_pointer(type_: drgn.Type) -> bool:
    """Return whether a type, such as ``cpumask_var_t``, is a pointer."""
    while type_.kind == drgn.TypeKind.TYPEDEF:
        type_ = type_.type
    pointer: bool = type_.kind == drgn.TypeKind.POINTER
    return pointer


def mask_at(reader: Reader, address: int) -> Cpus:
    """Read the ``struct cpumask`` at *address*.

    :raises UNREADABLE: if it cannot be read, or ``nr_cpu_ids`` is lost
    """
    count = _id_count(reader)
    return _cpus_in(reader.read(address, _bytes_for(count)), count)


@lru_cache(maxsize=64)
def _cpus_in(data: bytes, count: int) -> Cpus:
    # Cached: the same few masks are read again and again.
    return cpus_of(_bits(np.frombuffer(data, np.uint8)[None], count)[0])


def masks_at(
    reader: Reader, addresses: Addresses
) -> tuple[Masks, npt.NDArray[np.bool_]]:
    """Read many masks.

    :return: The masks, shape ``(len(addresses), nr_cpu_ids)``, and whether each is
        readable, shape ``(len(addresses),)``; an unreadable mask is empty. NULL is
        unreadable. If ``nr_cpu_ids`` is lost, all are, and the shape is (…, 1).
    """
    try:
        count = _id_count(reader)
    except UNREADABLE:
        none = np.zeros(len(addresses), np.bool_)
        return none.reshape(-1, 1), none
    records, readable = reader.read_records(addresses, _bytes_for(count))
    null = addresses == 0
    records[null] = 0
    return _bits(records, count), readable & ~null


def different_masks(
    raw: npt.NDArray[np.void], prog: drgn.Program
) -> tuple[Masks, npt.NDArray[np.intp]]:
    """Decode many masks of which few differ, such as those of all tasks.

    :param raw: The masks as they lie in memory, :func:`mask_bytes` each.
    :return: Each distinct mask once, and for each of *raw* the row of its mask.
    """
    different, index = np.unique(raw, return_inverse=True)
    records = np.ascontiguousarray(different).view(np.uint8)
    return _bits(records.reshape(-1, raw.itemsize), cpu_numbers(prog)), index


def cpus_of(mask: npt.NDArray[np.bool_]) -> Cpus:
    """Return the CPUs of one mask."""
    return tuple(mask.nonzero()[0].tolist())


def _bits(records: npt.NDArray[np.uint8], count: int) -> Masks:
    bits = np.unpackbits(records, axis=1, bitorder="little")
    return bits[:, :count].astype(np.bool_)


def mask_bytes(prog: drgn.Program) -> int:
    """Return the bytes of an allocated mask: whole words for ``nr_cpu_ids`` bits.

    :raises drgn.FaultError: if ``nr_cpu_ids`` is lost
    """
    return _bytes_for(cpu_numbers(prog))


def _bytes_for(count: int) -> int:
    return -(-count // 64) * 8


def _id_count(reader: Reader) -> int:
    # Read once, as it is fixed at boot.
    return reader.once(cpu_numbers, lambda: cpu_numbers(reader.prog))


def cpu_numbers(prog: drgn.Program) -> int:
    """Return ``nr_cpu_ids``, the highest possible CPU ID plus 1.

    :raises UNREADABLE: if it cannot be read, or is impossible
    """
    try:
        count = int(find_variable(prog, "nr_cpu_ids").value_())
    except MissingError:
        # No variable if NR_CPUS is 1.
        return 1
    # A mask has NR_CPUS bits.
    if not 0 < count <= 8 * drgn.sizeof(find_type(prog, "struct cpumask")):
        raise DamagedDataError(
            "no such number of CPUs", find_variable(prog, "nr_cpu_ids").address_
        )
    return count


# --- Addresses of per-CPU variables (include/linux/percpu-defs.h, mm/percpu.c).


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

    A CPU whose offset cannot be read is noted as a loss, and left out.
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
    # A reader of its own, as in possible_cpus(): the reads are not counted in a report.
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


# --- Sums of the per-CPU parts of struct percpu_counter (lib/percpu_counter.c).


_BLOCK_SHIFT = 16
_U64_MAX = (1 << 64) - 1


def sum_parts(
    reader: Reader, parts: Addresses, losses: LossLog
) -> npt.NDArray[np.int64]:
    """Sum the parts of each counter over all CPUs.

    The parts of all counters lie in a few blocks, with the same layout on each CPU: so
    it takes a few reads per CPU, not one per counter. An offline CPU has added its
    parts to the global count and left zeros. An unreadable part is a loss and zero.

    :param parts: Values of the member ``counters``: pointers to per-CPU ``s32``; NULL
        has no parts.
    :return: Shape ``(len(parts),)``.
    """
    has = parts != 0
    unique, index = np.unique(parts[has], return_inverse=True)
    sums = np.zeros(len(unique), np.int64)
    starts = np.flatnonzero(np.diff(unique >> np.uint64(_BLOCK_SHIFT)) != 0) + 1
    blocks = [
        (int(block[0]), (block - block[0]).astype(np.int64), rows)
        for rows in np.split(np.arange(len(unique)), starts)
        if len(block := unique[rows])
    ]
    lost = 0
    for offset in read_percpu(reader, losses).offsets.tolist():
        for first, offsets, rows in blocks:
            address = (first + offset) & _U64_MAX
            before = address % PAGE
            size = before + int(offsets[-1]) + 4
            data, gaps = reader.read_around_gaps(address - before, size, PAGE)
            starts = before + offsets
            span = np.frombuffer(data, np.uint8)
            sums[rows] += span[starts[:, None] + np.arange(4)].view("<i4")[:, 0]
            for gap in gaps:
                missing = (starts >= gap.offset) & (starts < gap.offset + gap.size)
                lost += int(np.count_nonzero(missing))
    lose_many(losses, "struct percpu_counter", lost)
    summed = np.zeros(len(parts), np.int64)
    summed[has] = sums[index]
    return summed
