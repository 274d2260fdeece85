# SPDX-License-Identifier: LGPL-2.1-or-later

"""Sets of CPUs: ``struct cpumask``, one or many (include/linux/cpumask.h).

Those that the kernel keeps of its own CPUs (kernel/cpu.c) have a name. drgn's own loops
over CPUs go as far as a damaged number of CPUs says.
"""

from collections.abc import Callable
from functools import lru_cache

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.selfdesc.variables import find_variable

_POSSIBLE = "msatools.possible CPUs"
"""Key of the program's cache."""

Masks = npt.NDArray[np.bool_]
"""A row a mask, a column a CPU number."""

Cpus = tuple[int, ...]
"""Numbers of CPUs, ascending."""


def possible_cpus(prog: drgn.Program, losses: LossLog) -> Cpus:
    """
    List all CPUs that can ever be online; none, with a note, if they are lost.

    They are known at boot, and looked for once a program.
    """
    known: Cpus | None = prog.cache.get(_POSSIBLE)
    if known is None:
        try:
            known = mask_at(Reader(prog), _kept_place(prog, "possible"))
        except drgn.FaultError as error:
            losses.lose(Loss.CPUS, f"the list of CPUs is lost: {error}")
            return ()
        prog.cache[_POSSIBLE] = known
    return known


def online_cpus(reader: Reader, losses: LossLog) -> Cpus:
    """Read which CPUs are online.

    If that is lost, it is those that tasks may come to: they are the same, but for CPUs
    that just come or go. One at least is online, so that none is a loss too.

    :raises LookupError: if nothing tells the type of the mask
    """
    online = kept_mask(reader, "online", losses)
    return online or kept_mask(reader, "active", losses) or ()


def kept_mask(reader: Reader, name: str, losses: LossLog) -> Cpus | None:
    """Read a mask that all kernels have: ``None``, with a note, if it is lost.

    :param name: ``possible``, ``present``, ``online`` or ``active``.
    :raises LookupError: if nothing tells its type
    """
    address = reader.once((kept_mask, name), lambda: _kept_place(reader.prog, name))
    return try_mask(reader, lambda: address, f"the mask of {name} CPUs", losses)


def _kept_place(prog: drgn.Program, name: str) -> int:
    address: int = find_variable(prog, f"__cpu_{name}_mask").address_
    return address


def try_mask(
    reader: Reader, place: Callable[[], int], what: str, losses: LossLog
) -> Cpus | None:
    """Read a mask; ``None``, with a note, if it cannot be read.

    :param place: Finds its address; 0 if there is none, and so no CPU in it.
    :param what: What it is called in the note.
    """
    try:
        address = place()
        return mask_at(reader, address) if address else ()
    except drgn.FaultError as error:
        losses.lose(Loss.MASKS, f"{what} is lost: {error}", about=what)
        return None


def place_of(mask: drgn.Object) -> int:
    """Tell where a ``cpumask_var_t`` has its CPUs; 0 if it has not been allocated.

    It is a pointer, or, without CONFIG_CPUMASK_OFFSTACK, the mask itself.
    """
    if is_pointer(mask.type_):
        return int(mask.value_())
    address: int = mask.address_
    return address


def is_pointer(type_: drgn.Type) -> bool:
    """Tell whether a type, such as ``cpumask_var_t``, is a pointer."""
    while type_.kind == drgn.TypeKind.TYPEDEF:
        type_ = type_.type
    pointer: bool = type_.kind == drgn.TypeKind.POINTER
    return pointer


def mask_at(reader: Reader, address: int) -> Cpus:
    """Read one mask.

    :raises drgn.FaultError: if it cannot be read
    """
    count = _numbers(reader)
    return _cpus_in(reader.read(address, _bytes_for(count)), count)


@lru_cache(maxsize=64)
def _cpus_in(words: bytes, count: int) -> Cpus:
    """List the CPUs of a mask: the same few are read again and again."""
    return cpus_of(_bits(np.frombuffer(words, np.uint8)[None], count)[0])


def masks_at(
    reader: Reader, addresses: Addresses
) -> tuple[Masks, npt.NDArray[np.bool_]]:
    """Read many masks.

    :return: Shapes ``(len(addresses), nr_cpu_ids)`` and ``(len(addresses),)``: the
        second tells which could be read, the others have no CPU. NULL is not readable;
        nothing is if the number of CPUs is lost.
    """
    try:
        count = _numbers(reader)
    except drgn.FaultError:
        none = np.zeros(len(addresses), np.bool_)
        return none.reshape(-1, 1), none
    records, readable = reader.read_records(addresses, _bytes_for(count))
    null = addresses == 0
    records[null] = 0
    return _bits(records, count), readable & ~null


def different_masks(
    raw: npt.NDArray[np.void], prog: drgn.Program
) -> tuple[Masks, npt.NDArray[np.intp]]:
    """Make sense of many masks of which most are alike, such as those of all tasks.

    :param raw: What is in memory, :func:`mask_bytes` each.
    :return: Each different mask once; which of them each is.
    """
    different, index = np.unique(raw, return_inverse=True)
    records = np.ascontiguousarray(different).view(np.uint8)
    return _bits(records.reshape(-1, raw.itemsize), cpu_numbers(prog)), index


def cpus_of(mask: npt.NDArray[np.bool_]) -> Cpus:
    """List the CPUs of one mask."""
    return tuple(np.flatnonzero(mask).tolist())


def _bits(records: npt.NDArray[np.uint8], count: int) -> Masks:
    bits = np.unpackbits(records, axis=1, bitorder="little")
    return bits[:, :count].astype(np.bool_)


def mask_bytes(prog: drgn.Program) -> int:
    """Tell the bytes of a mask: one that is allocated has but the words for CPUs that
    there can be.

    :raises drgn.FaultError: if the number of CPUs is lost
    """
    return _bytes_for(cpu_numbers(prog))


def _bytes_for(count: int) -> int:
    return -(-count // 64) * 8


def _numbers(reader: Reader) -> int:
    """Tell how many numbers there are, which is settled when the kernel starts."""
    return reader.once(cpu_numbers, lambda: cpu_numbers(reader.prog))


def cpu_numbers(prog: drgn.Program) -> int:
    """Tell how many numbers there are, of which some may be of no CPU.

    :raises drgn.FaultError: if that cannot be read, or cannot be
    """
    try:
        number = int(find_variable(prog, "nr_cpu_ids").value_())
    except LookupError:
        # Not a variable where NR_CPUS is 1.
        return 1
    # No more than a mask has bits: NR_CPUS.
    if not 0 < number <= 8 * drgn.sizeof(prog.type("struct cpumask")):
        raise drgn.FaultError(
            "no such number of CPUs", find_variable(prog, "nr_cpu_ids").address_
        )
    return number
