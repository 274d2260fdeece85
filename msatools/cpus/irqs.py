# SPDX-License-Identifier: LGPL-2.1-or-later

"""Interrupts: handlers, controllers, routing, affinity and counts."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from msatools.cpus.model import CpuSet, Irq, Vector
from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.code import kernel_symbol
from msatools.kernel.percpu import Cpus, Masks, PerCpu, cpus_of, is_pointer, masks_at
from msatools.kernel.reader import Addresses, Reader, column, read_string
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import (
    Booleans,
    Structs,
    constant,
    find_offset,
    read_structs,
)
from msatools.kernel.walks import Entries, maple_entries, xarray_entries
from msatools.selfdesc.find import find_type, find_variable
from msatools.tasks.text import KernelText

# --- Names of interrupts' handlers and controllers.


MAX_HANDLERS = 64
"""Maximum number of handlers of one interrupt that are read."""

_MAX_NAME = 256

_ACTION = {
    "next": ("next",),
    "name": ("name",),
    "handler": ("handler",),
    "thread": ("thread_fn",),
}
_CHIP = {
    "name": ("name",),
    "set_affinity": ("irq_set_affinity",),
}


class Chips(Struct, frozen=True):
    """The ``struct irq_chip`` of each interrupt's controller."""

    names: tuple[str | None, ...]
    can_move: Booleans
    """Whether it can move the interrupt to another CPU; true if unreadable."""


class Handler(NamedTuple):
    """A handler of an interrupt."""

    name: str
    function: int
    """Address of its function; of the thread's function if the handler only wakes the
    interrupt's thread."""


class IrqNames:
    """Strings of the kernel, cached by address."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses
        self._known: dict[int, str | None] = {0: None}

    def at(self, address: int) -> str | None:
        """Return the string at an address; ``None`` for NULL, or if it is lost."""
        if address not in self._known:
            self._known[address] = self._read(address)
        return self._known[address]

    def all_at(self, addresses: Addresses) -> tuple[str | None, ...]:
        """Return the string at each address, as :meth:`at` does."""
        return tuple(self.at(address) for address in addresses.tolist())

    def _read(self, address: int) -> str | None:
        try:
            return read_string(self._reader, address, _MAX_NAME)
        except UNREADABLE as error:
            self._losses.lose(Loss.NAMES, f"a name cannot be read: {error}")
            return None


def handlers(
    reader: Reader,
    actions: Addresses,
    primaries: Sequence[int],
    names: IrqNames,
    losses: LossLog,
) -> tuple[tuple[Handler, ...], ...]:
    """Return the handlers of each interrupt, in the order in which they are called.

    :param actions: Address of each interrupt's first ``struct irqaction``, or NULL.
    :param primaries: Addresses of the kernel's handlers that only wake a thread.
    """
    found: list[list[Handler]] = [[] for _ in actions]
    rows = np.flatnonzero(actions)
    actions = actions[rows]
    for _ in range(MAX_HANDLERS):
        read = read_structs(reader, "struct irqaction", _ACTION, actions, losses)
        stands_for = np.isin(read["handler"], np.array(primaries, np.uint64))
        function = np.where(stands_for, read["thread"], read["handler"])
        for row, name, address in zip(
            rows.tolist(), names.all_at(read["name"]), function.tolist(), strict=True
        ):
            if name:
                found[row].append(Handler(name, address))
        more = read["next"] != 0
        rows, actions = rows[more], read["next"][more]
        if not len(rows):
            break
    else:
        text = "some interrupts have an impossible number of handlers"
        losses.lose(Loss.HANDLERS, text, count=len(rows))
    return tuple(map(tuple, found))


def read_chips(
    reader: Reader, chips: Addresses, names: IrqNames, losses: LossLog
) -> Chips:
    """Read the controller of each interrupt."""
    read = read_structs(reader, "struct irq_chip", _CHIP, chips, losses)
    unreadable = ~read.readable & (chips != 0)
    return Chips(names.all_at(read["name"]), unreadable | (read["set_affinity"] != 0))


# --- Interrupts: handlers, routing, affinity and counts.
#
# kernel/irq/irqdesc.c, kernel/irq/proc.c. An interrupt *goes* to the CPUs of its
# effective affinity, usually one on x86-64 and arm64. It *may go* to those of its
# affinity, after a write to smp_affinity or when a CPU goes offline.


Counts = npt.NDArray[np.int64]

COUNTER = 1 << 32
"""Modulus of counts: they have 32 bits and wrap around, also in /proc/interrupts."""

_DESC_TYPE = "struct irq_desc"
_AFFINITY = ("irq_common_data.affinity",)
# With CONFIG_GENERIC_IRQ_EFFECTIVE_AFF_MASK and CONFIG_GENERIC_PENDING_IRQ.
_EFFECTIVE = ("irq_common_data.effective_affinity",)
_PENDING = ("pending_mask",)

_DESC = {
    "irq": ("irq_data.irq",),
    "hwirq": ("irq_data.hwirq",),
    "chip": ("irq_data.chip",),
    "state": ("irq_common_data.state_use_accessors",),
    "settings": ("status_use_accessors",),
    "depth": ("depth",),
    "kstat": ("kstat_irqs",),
    "action": ("action",),
    "flow": ("name",),
    "affinity": _AFFINITY,
    "effective": _EFFECTIVE,
    "pending": _PENDING,
}


class IrqTable(Struct, frozen=True):
    """Interrupts with a ``struct irq_desc``: one row each, in the order of numbers."""

    cpus: npt.NDArray[np.int64]
    """Number of the CPU of each column of ``counts``."""

    irq: npt.NDArray[np.int64]
    address: Addresses
    """Address of the ``struct irq_desc``."""

    names: tuple[tuple[str, ...], ...]
    """Names of the handlers."""

    chip: tuple[str | None, ...]
    """Name of the controller."""

    hwirq: Addresses
    """Number of the interrupt in the controller."""

    flow: tuple[str | None, ...]
    """Name of the flow handler, as in /proc/interrupts on x86: ``edge``, ``fasteoi``.
    """

    affinity: Masks
    """CPUs that it may go to, as in /proc/irq/N/smp_affinity; all if unreadable. Shape
    ``(interrupts, nr_cpu_ids)``."""

    effective: Masks
    """CPUs that it goes to, of the same shape; all if unreadable."""

    counts: Counts
    """How often it came; 0 if unreadable. Shape ``(interrupts, cpus)``."""

    counted: Booleans
    """Whether all counts could be read."""

    handled: Booleans
    """Whether it has a handler; ``chained_action`` is one."""

    chained: Booleans
    """Whether a cascaded interrupt controller raises it, so that it is not counted."""

    nested: Booleans
    """Whether it is handled in the thread of its parent interrupt."""

    device: Booleans
    """Whether it is of a device: not a per-CPU interrupt, such as of timers, nor an
    IPI."""

    managed: Booleans
    """Whether only the kernel sets its affinity."""

    movable: Booleans
    """Whether a write to /proc/irq/N/smp_affinity moves it."""

    started: Booleans
    """Whether it is started; a managed interrupt is shut down while no CPU of its
    affinity is online."""

    disabled: Booleans
    """Whether it is started, but disabled: by disable_irq(), or by the kernel because
    no handler wanted it ("nobody cared")."""

    hidden: Booleans
    """Whether /proc/interrupts leaves it out."""

    complete: bool
    """Whether all interrupts were found."""

    functions: tuple[tuple[int, ...], ...] = ()
    """Addresses of the handlers, as :attr:`.Handler.function`; empty if not read."""

    since_boot: bool = True
    """Whether counts are since boot, not within an interval."""

    def __len__(self) -> int:
        return len(self.irq)

    @property
    def placed(self) -> Booleans:
        """Whether it is of a device, has a handler, and is not nested in another."""
        return self.device & self.handled & ~self.nested

    @property
    def listed(self) -> Booleans:
        """Whether /proc/interrupts lists it: it has a handler, or has come before."""
        return ~self.hidden & (self.handled & ~self.chained | self.came)

    @property
    def came(self) -> Booleans:
        """Whether it was counted at least once."""
        came: Booleans = (self.counts != 0).any(axis=1)
        return came


def read_irqs(reader: Reader, percpu: PerCpu, losses: LossLog) -> IrqTable:
    """Read all interrupts; those that cannot be read are counted as lost."""
    prog = reader.prog
    lost = losses.lost.total()
    addresses, desc = _find(reader, losses)
    if not len(addresses) and losses.lost.total() == lost:
        losses.lose(Loss.IRQS, "no interrupt was found")
    complete = losses.lost.total() == lost
    state, settings = _Bits(prog, desc["state"]), _Bits(prog, desc["settings"])
    names = IrqNames(reader, losses)
    chips = read_chips(reader, desc["chip"], names, losses)
    affinity, effective = _affinities(reader, addresses, desc, state, losses)
    counts, counted = _counts(reader, percpu, desc["kstat"], losses)
    handled = desc["action"] != 0
    chained = handled & (desc["action"] == _chained(prog))
    managed = state.have("IRQD_AFFINITY_MANAGED")
    started = state.have("IRQD_IRQ_STARTED")
    actions = np.where(chained, 0, desc["action"])
    found = handlers(reader, actions, _primaries(prog), names, losses)
    table = IrqTable(
        cpus=percpu.cpus,
        irq=desc["irq"].astype(np.int64),
        address=addresses,
        names=tuple(tuple(each.name for each in some) for some in found),
        functions=tuple(tuple(each.function for each in some) for some in found),
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
        started=started,
        disabled=started & handled & (desc["depth"] != 0),
        hidden=settings.have("_IRQ_HIDDEN"),
        complete=complete,
    )
    losses.coverage["irqs"] += len(table)
    return table


def delta(before: IrqTable, after: IrqTable) -> IrqTable:
    """Return *after* with the counts since *before*, a sample of the same CPUs.

    A new interrupt, or one whose counts decreased because another device has its number
    now, has its full counts. Counts of a removed interrupt are dropped. Counts that
    could not be read in one of the samples are 0.
    """
    rows = {key: row for row, key in enumerate(_keys(before))}
    counts, counted = after.counts.copy(), after.counted.copy()
    for row, key in enumerate(_keys(after)):
        if key not in rows:
            counted[row] &= before.complete
            continue
        counted[row] &= before.counted[rows[key]]
        came = (after.counts[row] - before.counts[rows[key]]) % COUNTER
        # A growth of more than half of the range is a decrease.
        if (came < COUNTER // 2).all():
            counts[row] = came
    counts[~counted] = 0
    return replace(after, counts=counts, counted=counted, since_boot=False)


def _keys(table: IrqTable) -> list[tuple[int, int]]:
    """Return number and descriptor address of each interrupt: numbers are reused."""
    return list(zip(table.irq.tolist(), table.address.tolist(), strict=True))


def irqs(table: IrqTable, text: KernelText | None = None) -> tuple[Irq, ...]:
    """Return the rows of the interrupts of devices, by number.

    :param text: Looks up the names of handlers' functions; without it there are none.
    """
    total = int(table.counts[table.device].sum())
    rows = np.flatnonzero(table.device & table.listed).tolist()
    return tuple(_irq(table, row, total, text) for row in rows)


def percpu_interrupts(table: IrqTable) -> tuple[Vector, ...]:
    """Return the rows of interrupts that have a number, but are not of devices.

    Such as arm64's timers; /proc/interrupts lists them by their number.
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
    """Add to each set the interrupts of devices that go, and may go, to its CPUs.

    Only interrupts with a handler and online CPUs count. An interrupt that is not
    started, such as a managed one while no CPU of its affinity is online, goes to no
    CPU now. Nor does one whose affinity was changed since it last occurred: the kernel
    moves it when it next occurs on its old CPU.
    """
    allowed = table.affinity & table.placed[:, None]
    routed = table.effective & (table.placed & table.started)[:, None]
    moves = ~(table.effective & table.affinity).any(axis=1) & table.movable
    routed &= ~moves[:, None]
    return tuple(_routed(one, table, allowed, routed, online) for one in sets)


def no_intr_cpus(table: IrqTable, online: Cpus) -> set[int]:
    """Find the CPUs that no interrupt of a device may go to: psrinfo's no-intr.

    An interrupt that can be moved may go to all CPUs of its affinity: irqbalance or a
    CPU that goes offline moves it. (If its affinity was changed since it last occurred,
    it occurs once more on its old CPU.) Other interrupts stay on their current CPUs.
    The interrupt of a queue for one CPU alone (see ``_own``) does not count, as it
    occurs only after requests of that CPU; within an interval it counts if it occurred.

    If some interrupts, or their affinity, could not be read, there may be more such
    CPUs than returned, but not fewer.
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
    """Return which managed interrupts have one online CPU alone in their affinity.

    Such an interrupt occurs only after requests of that CPU
    (Documentation/admin-guide/kernel-parameters.txt, isolcpus=managed_irq).
    """
    alone: Booleans = table.affinity[:, online].sum(axis=1) == 1
    return table.placed & table.managed & alone


def _routed(
    one: CpuSet, table: IrqTable, allowed: Masks, routed: Masks, online: Cpus
) -> CpuSet:
    cpus = sorted(set(one.cpus).intersection(online))
    may = allowed[:, cpus].any(axis=1)
    goes = routed[:, cpus].any(axis=1)
    return replace(
        one,
        irqs_routed=tuple(table.irq[goes].tolist()),
        irqs_allowed=tuple(table.irq[may].tolist()),
        irqs_managed=int(np.count_nonzero(may & table.managed)),
    )


def _irq(
    table: IrqTable, row: int, all_of_devices: int, text: KernelText | None
) -> Irq:
    total = int(table.counts[row].sum()) if table.counted[row] else None
    return Irq(
        irq=int(table.irq[row]),
        name=_text(table, row),
        chip=table.chip[row],
        affinity=cpus_of(table.affinity[row]),
        effective=cpus_of(table.effective[row]),
        managed=bool(table.managed[row]),
        disabled=bool(table.disabled[row]),
        counts=_by_cpu(table, row),
        total=total,
        share=None if total is None else _share(total, all_of_devices),
        functions=handler_names(table, row, text) if text else (),
    )


def handler_names(table: IrqTable, row: int, text: KernelText) -> tuple[str, ...]:
    """Return the functions of the handlers of an interrupt, with their modules."""
    return tuple(map(text.named, table.functions[row])) if table.functions else ()


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _text(table: IrqTable, row: int) -> str:
    return ", ".join(table.names[row])


def _by_cpu(table: IrqTable, row: int) -> dict[int, int]:
    counts = table.counts[row]
    came = counts.nonzero()[0]
    return dict(zip(table.cpus[came].tolist(), counts[came].tolist(), strict=True))


# --- Reads the descriptors and counters of interrupts.


class _Bits:
    """Flag words of all interrupts, tested by the names of enumerators."""

    def __init__(self, prog: drgn.Program, words: npt.NDArray[Any]) -> None:
        self._prog = prog
        self._words = words

    def have(self, *names: str) -> Booleans:
        """Return which interrupts have at least one of the named flags."""
        bits = 0
        for name in names:
            bits |= constant(self._prog, name)
        found: Booleans = (self._words & np.uint32(bits)) != 0
        return found


def _find(reader: Reader, losses: LossLog) -> tuple[Addresses, Structs]:
    """Return address and members of every ``struct irq_desc`` that is not damaged."""
    entries = _entries(reader, losses)
    irqs = np.array([irq for irq, _, _ in entries], np.uint64)
    addresses = np.array([address for _, _, address in entries], np.uint64)
    desc = read_structs(reader, _DESC_TYPE, _DESC, addresses, losses)
    valid = desc.readable & (desc["irq"] == irqs)
    wrong = int(np.count_nonzero(desc.readable & ~valid))
    text = "an interrupt's descriptor is damaged"
    losses.lose(Loss.IRQ_DESCRIPTORS, text, count=wrong)
    columns = {name: values[valid] for name, values in desc.columns.items()}
    return addresses[valid], Structs(columns, desc.readable[valid])


def _entries(reader: Reader, losses: LossLog) -> Entries:
    prog = reader.prog
    name = "the tree of interrupts"
    try:
        # Linux kernel commit 721255b9826b ("genirq: Use a maple tree for interrupt
        # descriptor management") (in v6.5)
        root = find_variable(prog, "sparse_irqs").address_
    except MissingError:
        pass
    else:
        return maple_entries(reader, root, losses, name)
    try:
        root = find_variable(prog, "irq_desc_tree").address_
    except MissingError:
        # An array without CONFIG_SPARSE_IRQ; x86-64 and arm64 always have the latter.
        losses.lose(Loss.IRQS, f"{name} is not found")
        return []
    return xarray_entries(reader, root, losses, name)


def _chained(prog: drgn.Program) -> int:
    """Find ``chained_action``, the handler of cascaded controllers; 0 if not found."""
    try:
        address: int = find_variable(prog, "chained_action").address_
    except MissingError:
        return 0
    return address


def _primaries(prog: drgn.Program) -> list[int]:
    """Return the addresses of handlers that only wake a thread (see irq/manage.c)."""
    found = []
    for name in ("irq_default_primary_handler", "irq_nested_primary_handler"):
        with suppress(MissingError):
            found.append(kernel_symbol(prog, name))
    return found


def _affinities(
    reader: Reader,
    addresses: Addresses,
    desc: Structs,
    state: _Bits,
    losses: LossLog,
) -> tuple[Masks, Masks]:
    """Read the affinity and the effective affinity, as show_irq_affinity() does."""
    wanted = _mask_addresses(reader.prog, addresses, desc, "affinity", _AFFINITY)
    if desc.has("pending"):
        pending = _mask_addresses(reader.prog, addresses, desc, "pending", _PENDING)
        wanted = np.where(state.have("IRQD_SETAFFINITY_PENDING"), pending, wanted)
    if desc.has("effective"):
        goes = _mask_addresses(reader.prog, addresses, desc, "effective", _EFFECTIVE)
    else:
        goes = wanted
    masks, readable = masks_at(reader, np.concatenate([wanted, goes]))
    # An unknown mask must not count as keeping an interrupt away from a CPU.
    masks[~readable] = True
    lost = int(np.count_nonzero(~readable))
    text = "cannot read the affinity of some interrupts"
    losses.lose(Loss.IRQ_AFFINITY, text, count=lost)
    return masks[: len(addresses)], masks[len(addresses) :]


def _mask_addresses(
    prog: drgn.Program,
    addresses: Addresses,
    desc: Structs,
    name: str,
    members: tuple[str, ...],
) -> Addresses:
    """Return the address of each descriptor's mask of type ``cpumask_var_t``.

    That type is a pointer with CONFIG_CPUMASK_OFFSTACK, else the mask itself.
    """
    if is_pointer(find_type(prog, "cpumask_var_t")):
        pointers: Addresses = desc[name]
        return pointers
    offset = find_offset(find_type(prog, _DESC_TYPE), members)
    assert offset is not None
    return addresses + np.uint64(offset)


def _counts(
    reader: Reader, percpu: PerCpu, pointers: Addresses, losses: LossLog
) -> tuple[Counts, Booleans]:
    """Read ``kstat_irqs`` of each interrupt on each CPU.

    :return: The counts, of shape ``(interrupts, cpus)``, and for each interrupt whether
        all of its counts could be read.

    Since Linux kernel commit 86d2a2f51fba ("genirq: Convert kstat_irqs to a struct")
    (in v6.10) the count is the first member of a structure.
    """
    addresses = np.concatenate(
        [percpu.at(pointer) for pointer in pointers.tolist()]
        or [np.zeros(0, np.uint64)]
    )
    records, readable = reader.read_records(addresses, 4)
    lost = ~readable & (addresses != 0)
    text = "cannot read the counts of some interrupts"
    losses.lose(Loss.IRQ_COUNTS, text, count=int(np.count_nonzero(lost)))
    counts = np.where(addresses != 0, column(records, 0, 4), 0)
    shape = len(pointers), len(percpu.cpus)
    return counts.astype(np.int64).reshape(shape), ~lost.reshape(shape).any(axis=1)
