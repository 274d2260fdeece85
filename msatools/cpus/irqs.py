# SPDX-License-Identifier: LGPL-2.1-or-later

"""Interrupts: who handles them, where they go, where they may, and how many came.

kernel/irq/irqdesc.c, kernel/irq/proc.c. An interrupt *goes* to the CPUs of its
effective affinity, which on x86-64 and arm64 is one; it *may go* to those of its
affinity, when someone writes it anew or a CPU goes offline.
"""

from dataclasses import dataclass, replace
from typing import Any

import drgn
import numpy as np
import numpy.typing as npt

from msatools.cpus.irqnames import IrqNames, handlers, read_chips
from msatools.cpus.model import CpuSet, Irq, Vector
from msatools.kernel.cpumask import Cpus, Masks, cpus_of, is_pointer, masks_at
from msatools.kernel.enums import constant
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Addresses, Reader, column
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans, Structs, find_offset, read_structs
from msatools.kernel.xarray import Entries, maple_entries, xarray_entries
from msatools.selfdesc.variables import find_variable

Counts = npt.NDArray[np.int64]

COUNTER = 1 << 32
"""Counts are of so many bits, and begin anew after that, also in /proc/interrupts."""

_DESC_TYPE = "struct irq_desc"
_AFFINITY = ("irq_common_data.affinity",)
# There with CONFIG_GENERIC_IRQ_EFFECTIVE_AFF_MASK and CONFIG_GENERIC_PENDING_IRQ.
_EFFECTIVE = ("irq_common_data.effective_affinity",)
_PENDING = ("pending_mask",)

_DESC = {
    "irq": ("irq_data.irq",),
    "hwirq": ("irq_data.hwirq",),
    "chip": ("irq_data.chip",),
    "state": ("irq_common_data.state_use_accessors",),
    "settings": ("status_use_accessors",),
    "kstat": ("kstat_irqs",),
    "action": ("action",),
    "flow": ("name",),
    "affinity": _AFFINITY,
    "effective": _EFFECTIVE,
    "pending": _PENDING,
}


@dataclass(frozen=True)
class IrqTable:
    """The interrupts that have a number, a row each, ascending."""

    cpus: npt.NDArray[np.int64]
    """Of the columns of ``counts``."""

    irq: npt.NDArray[np.int64]
    address: Addresses
    """Of the ``struct irq_desc``."""

    names: tuple[tuple[str, ...], ...]
    """Who handles it, several if they share it."""

    chip: tuple[str | None, ...]
    """The controller."""

    hwirq: Addresses
    """Its number there."""

    flow: tuple[str | None, ...]
    """How it is handled, as /proc/interrupts says on x86: ``edge``, ``fasteoi``."""

    affinity: Masks
    """The CPUs that it may go to, as /proc/irq/N/smp_affinity has them; those that a
    damaged dump does not tell are all."""

    effective: Masks
    """The CPUs that it goes to, likewise."""

    counts: Counts
    """How often each CPU took it; 0 where that is lost."""

    counted: Booleans
    """Whether none of these is lost."""

    handled: Booleans
    """Whether anyone takes it: it has a handler, or is of a controller behind which
    there are others."""

    chained: Booleans
    """Whether it is such a controller's, which is not counted."""

    nested: Booleans
    """Whether it is one behind another, and taken in the thread of that."""

    device: Booleans
    """Whether it is of a device: not of timers and such that each CPU has its own of,
    nor what CPUs send each other."""

    managed: Booleans
    """Whether the kernel alone places it."""

    movable: Booleans
    """Whether a write to /proc/irq/N/smp_affinity places it."""

    started: Booleans
    """Whether it can come now; one that is managed is shut down while no CPU of its
    affinity is online."""

    hidden: Booleans
    """Whether /proc/interrupts leaves it out."""

    complete: bool
    """Whether all were found."""

    since_boot: bool = True
    """Whether counts are since boot, or within an interval."""

    def __len__(self) -> int:
        return len(self.irq)

    @property
    def placed(self) -> Booleans:
        """Those of devices that a handler waits for on some CPU."""
        return self.device & self.handled & ~self.nested

    @property
    def listed(self) -> Booleans:
        """Those that /proc/interrupts lists, or that came before their handler went."""
        return ~self.hidden & (self.handled & ~self.chained | self.came)

    @property
    def came(self) -> Booleans:
        """Those that are counted at least once."""
        came: Booleans = (self.counts != 0).any(axis=1)
        return came


def read_irqs(reader: Reader, percpu: PerCpu, losses: LossLog) -> IrqTable:
    """Read all interrupts; one that cannot be read costs a note."""
    prog = reader.prog
    lost = losses.lost.total()
    addresses, desc = _find(reader, losses)
    if not len(addresses) and losses.lost.total() == lost:
        losses.lose(Loss.IRQS, "no interrupt is found, and all kernels have some")
    complete = losses.lost.total() == lost
    state, settings = _Bits(prog, desc["state"]), _Bits(prog, desc["settings"])
    names = IrqNames(reader, losses)
    chips = read_chips(reader, desc["chip"], names, losses)
    affinity, effective = _affinities(reader, addresses, desc, state, losses)
    counts, counted = _counts(reader, percpu, desc["kstat"], losses)
    handled = desc["action"] != 0
    chained = handled & (desc["action"] == _chained(prog))
    managed = state.have("IRQD_AFFINITY_MANAGED")
    table = IrqTable(
        cpus=percpu.cpus,
        irq=desc["irq"].astype(np.int64),
        address=addresses,
        names=handlers(reader, np.where(chained, 0, desc["action"]), names, losses),
        chip=chips.names,
        hwirq=desc["hwirq"],
        flow=names.all_at(desc["flow"]),
        affinity=affinity,
        effective=effective,
        counts=counts,
        counted=counted,
        handled=handled,
        chained=chained,
        nested=settings.have("_IRQ_NESTED_THREAD"),
        device=~settings.have("_IRQ_PER_CPU", "_IRQ_PER_CPU_DEVID"),
        managed=managed,
        movable=(
            chips.can_move & ~managed & ~state.have("IRQD_PER_CPU", "IRQD_NO_BALANCING")
        ),
        started=state.have("IRQD_IRQ_STARTED"),
        hidden=settings.have("_IRQ_HIDDEN"),
        complete=complete,
    )
    losses.coverage["irqs"] += len(table)
    return table


def delta(before: IrqTable, after: IrqTable) -> IrqTable:
    """Return what came between two readings, each of the CPUs of the same ``PerCpu``.

    An interrupt that was not there before, or whose counts went back as another device
    has its number now, came as often as it counts. What one that is gone had counted
    is gone too. One whose counts, or itself, were lost in either reading has none.
    """
    rows = {key: row for row, key in enumerate(_keys(before))}
    counts, counted = after.counts.copy(), after.counted.copy()
    for row, key in enumerate(_keys(after)):
        if key not in rows:
            counted[row] &= before.complete
            continue
        counted[row] &= before.counted[rows[key]]
        came = (after.counts[row] - before.counts[rows[key]]) % COUNTER
        # More than half of what can be counted is a counter that went back.
        if (came < COUNTER // 2).all():
            counts[row] = came
    counts[~counted] = 0
    return replace(after, counts=counts, counted=counted, since_boot=False)


def _keys(table: IrqTable) -> list[tuple[int, int]]:
    """Return a key of each interrupt, as numbers are used again."""
    return list(zip(table.irq.tolist(), table.address.tolist(), strict=True))


def irqs(table: IrqTable) -> tuple[Irq, ...]:
    """Make rows of the interrupts of devices, by number."""
    total = int(table.counts[table.device].sum())
    rows = np.flatnonzero(table.device & table.listed).tolist()
    return tuple(_irq(table, row, total) for row in rows)


def percpu_interrupts(table: IrqTable) -> tuple[Vector, ...]:
    """Make rows of those with a number that are of no device, such as arm64's timers.

    /proc/interrupts has them by their number.
    """
    rows = np.flatnonzero(~table.device & table.listed).tolist()
    return tuple(
        Vector(
            name=str(table.irq[row]),
            text=_text(table, row),
            counts=_by_cpu(table, row),
            total=int(table.counts[row].sum()),
        )
        for row in rows
    )


def route(
    sets: tuple[CpuSet, ...], table: IrqTable, online: Cpus
) -> tuple[CpuSet, ...]:
    """Return each set the interrupts of devices that go, and may go, to its CPUs.

    Only those count that someone handles, and only CPUs that are online: none goes to
    another. One that is not started, as one that is managed while no CPU of its
    affinity is online, goes nowhere, but may. One whose affinity was changed since it
    came last is not routed yet: when it comes once more where it went, the kernel moves
    it to one of its new CPUs.
    """
    allowed = table.affinity & table.placed[:, None]
    routed = table.effective & (table.placed & table.started)[:, None]
    moves = ~(table.effective & table.affinity).any(axis=1) & table.movable
    routed &= ~moves[:, None]
    return tuple(_routed(each, table, allowed, routed, online) for each in sets)


def no_intr_cpus(table: IrqTable, online: Cpus) -> set[int]:
    """Find the CPUs that no interrupt of a device may go to: psrinfo's no-intr.

    Of an interrupt that can be moved, all CPUs of its affinity count: it goes to one of
    them now, and to another when irqbalance wants it so or a CPU goes offline. (If its
    affinity was changed since it came last, it comes once more where it went before.)
    Of one that nobody but the kernel moves, it is the CPUs that it goes to. A queue
    that the kernel gave to one CPU alone (see ``_own``) does not count: it
    answers only what that CPU asks of the device; but within an interval it does, if it
    came.

    If some interrupts, or their affinity, could not be read, there may be more of such
    CPUs than are found, but no less.
    """
    if not table.complete:
        return set()
    own = _own(table, online)
    counting = table.placed & ~(own if table.since_boot else own & ~table.came)
    fixed = counting & table.started & ~table.movable
    may = table.affinity & (counting & table.movable)[:, None]
    goes = table.effective & fixed[:, None]
    taking = set(np.flatnonzero((may | goes).any(axis=0)).tolist())
    return set(online) - taking


def _own(table: IrqTable, online: Cpus) -> Booleans:
    """Return which interrupts are of queues that a device has for one CPU alone.

    Such a queue's interrupt comes only after tasks of that CPU asked the device for
    something (Documentation/admin-guide/kernel-parameters.txt, isolcpus=managed_irq).
    It may be for others too, if they are not online.
    """
    alone: Booleans = table.affinity[:, online].sum(axis=1) == 1
    return table.placed & table.managed & alone


def _routed(
    each: CpuSet, table: IrqTable, allowed: Masks, routed: Masks, online: Cpus
) -> CpuSet:
    there = sorted(set(each.cpus).intersection(online))
    may = allowed[:, there].any(axis=1)
    goes = routed[:, there].any(axis=1)
    return replace(
        each,
        irqs_routed=tuple(table.irq[goes].tolist()),
        irqs_allowed=tuple(table.irq[may].tolist()),
        irqs_managed=int(np.count_nonzero(may & table.managed)),
    )


def _irq(table: IrqTable, row: int, all_of_devices: int) -> Irq:
    total = int(table.counts[row].sum()) if table.counted[row] else None
    return Irq(
        irq=int(table.irq[row]),
        name=_text(table, row),
        chip=table.chip[row],
        affinity=cpus_of(table.affinity[row]),
        effective=cpus_of(table.effective[row]),
        managed=bool(table.managed[row]),
        counts=_by_cpu(table, row),
        total=total,
        share=None if total is None else _share(total, all_of_devices),
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _text(table: IrqTable, row: int) -> str:
    return ", ".join(table.names[row])


def _by_cpu(table: IrqTable, row: int) -> dict[int, int]:
    counts = table.counts[row]
    came = np.flatnonzero(counts)
    return dict(zip(table.cpus[came].tolist(), counts[came].tolist(), strict=True))


# --- reading


class _Bits:
    """Flags of each interrupt, by the names of their enumerators."""

    def __init__(self, prog: drgn.Program, words: npt.NDArray[Any]) -> None:
        self._prog = prog
        self._words = words

    def have(self, *names: str) -> Booleans:
        """Return which have one of these flags."""
        bits = 0
        for name in names:
            bits |= constant(self._prog, name)
        found: Booleans = (self._words & np.uint32(bits)) != 0
        return found


def _find(reader: Reader, losses: LossLog) -> tuple[Addresses, Structs]:
    """Find and read every ``struct irq_desc``; what is none costs a note."""
    entries = _entries(reader, losses)
    numbers = np.array([number for number, _, _ in entries], np.uint64)
    addresses = np.array([address for _, _, address in entries], np.uint64)
    desc = read_structs(reader, _DESC_TYPE, _DESC, addresses, losses)
    right = desc.readable & (desc["irq"] == numbers)
    wrong = int(np.count_nonzero(desc.readable & ~right))
    text = "what should be an interrupt is none, or another"
    losses.lose(Loss.IRQ_DESCRIPTORS, text, count=wrong)
    columns = {name: values[right] for name, values in desc.columns.items()}
    return addresses[right], Structs(columns, desc.readable[right])


def _entries(reader: Reader, losses: LossLog) -> Entries:
    prog = reader.prog
    name = "the tree of interrupts"
    try:
        # Linux kernel commit 721255b9826b ("genirq: Use a maple tree for interrupt
        # descriptor management") (in v6.5)
        root = find_variable(prog, "sparse_irqs").address_
    except LookupError:
        pass
    else:
        return maple_entries(reader, root, losses, name)
    try:
        root = find_variable(prog, "irq_desc_tree").address_
    except LookupError:
        # A table, without CONFIG_SPARSE_IRQ, which x86-64 and arm64 always have.
        losses.lose(Loss.IRQS, f"{name} is not found")
        return []
    return xarray_entries(reader, root, losses, name)


def _chained(prog: drgn.Program) -> int:
    """Find what stands for a handler of controllers behind which there are others."""
    try:
        address: int = find_variable(prog, "chained_action").address_
    except LookupError:
        return 0
    return address


def _affinities(
    reader: Reader,
    addresses: Addresses,
    desc: Structs,
    state: _Bits,
    losses: LossLog,
) -> tuple[Masks, Masks]:
    """Read the affinity and the effective one, as show_irq_affinity() does."""
    wanted = _mask_addresses(reader.prog, addresses, desc, "affinity", _AFFINITY)
    if desc.has("pending"):
        pending = _mask_addresses(reader.prog, addresses, desc, "pending", _PENDING)
        wanted = np.where(state.have("IRQD_SETAFFINITY_PENDING"), pending, wanted)
    if desc.has("effective"):
        goes = _mask_addresses(reader.prog, addresses, desc, "effective", _EFFECTIVE)
    else:
        goes = wanted
    masks, readable = masks_at(reader, np.concatenate([wanted, goes]))
    # Nothing is said to be kept away from a CPU that may well get it.
    masks[~readable] = True
    lost = int(np.count_nonzero(~readable))
    text = "where some interrupts may go is lost"
    losses.lose(Loss.IRQ_AFFINITY, text, count=lost)
    return masks[: len(addresses)], masks[len(addresses) :]


def _mask_addresses(
    prog: drgn.Program,
    addresses: Addresses,
    desc: Structs,
    name: str,
    members: tuple[str, ...],
) -> Addresses:
    """Find a ``cpumask_var_t``: a pointer, or without CPUMASK_OFFSTACK the mask."""
    if is_pointer(prog.type("cpumask_var_t")):
        pointers: Addresses = desc[name]
        return pointers
    offset = find_offset(prog.type(_DESC_TYPE), members)
    assert offset is not None
    return addresses + np.uint64(offset)


def _counts(
    reader: Reader, percpu: PerCpu, pointers: Addresses, losses: LossLog
) -> tuple[Counts, Booleans]:
    """Read ``kstat_irqs`` of each interrupt on each CPU.

    :return: The counts, and of which interrupts all could be read.

    Since Linux kernel commit 86d2a2f51fba ("genirq: Convert kstat_irqs to a struct")
    (in v6.10) the count is the first member of a structure.
    """
    places = np.concatenate(
        [percpu.at(pointer) for pointer in pointers.tolist()]
        or [np.zeros(0, np.uint64)]
    )
    records, readable = reader.read_records(places, 4)
    lost = ~readable & (places != 0)
    text = "how often some interrupts came is lost"
    losses.lose(Loss.IRQ_COUNTS, text, count=int(np.count_nonzero(lost)))
    counts = np.where(places != 0, column(records, 0, 4), 0)
    shape = len(pointers), len(percpu.cpus)
    return counts.astype(np.int64).reshape(shape), ~lost.reshape(shape).any(axis=1)
