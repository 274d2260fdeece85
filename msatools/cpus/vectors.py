# SPDX-License-Identifier: LGPL-2.1-or-later

"""Counts of the CPUs' own interrupts (not of devices), and of softirqs."""

from collections.abc import Mapping

import numpy as np
from msgspec import Struct, field

from msatools.cpus.model import Vector
from msatools.cpus.times import Counts, believed, counts, total
from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Reader, column, read_string
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import Enumerators, Members, enumerators, read_structs
from msatools.selfdesc.find import find_symbol, find_type, member_of, offset_of

# --- Interrupts that CPUs of arm64 send each other (arch/arm64/kernel/smp.c).
#
# They have numbers, descriptors and counts like those of devices, but /proc/interrupts
# lists them as IPI0 and so on.


_MOST = 16
_TEXT_SIZE = 64


class Ipis(Struct, frozen=True):
    """Inter-processor interrupts by name (``IPI0``); all empty except on arm64."""

    counts: Mapping[str, Counts]
    texts: Mapping[str, str]
    """What each kind is for, as /proc/interrupts says."""

    calls: str | None
    """Name of the interrupt for function calls; ``None`` if unknown."""


NO_IPIS = Ipis({}, {}, None)


def read_ipis(reader: Reader, percpu: PerCpu, losses: LossLog) -> Ipis:
    """Read the number of inter-processor interrupts of each kind, by CPU."""
    try:
        kinds = enumerators(reader.prog, "enum ipi_msg_type")
        # Since "arm64: Allow IPIs to be handled as normal interrupts" (in v5.10)
        array = find_symbol(reader.prog, "ipi_desc").address
        texts = find_symbol(reader.prog, "ipi_types").address
        offset = offset_of(find_type(reader.prog, "struct irq_desc"), "kstat_irqs")
    except MissingError:
        return NO_IPIS
    found: dict[str, Counts] = {}
    named: dict[str, str] = {}
    # Newer kernels have kinds beyond NR_IPI, and list them in /proc/interrupts, too.
    count = min(kinds.get("MAX_IPI", kinds.get("NR_IPI", 0)), _MOST)
    try:
        descriptors = reader.words(array, count).tolist()
        names = reader.words(texts, count).tolist()
        for number, (descriptor, name) in enumerate(
            zip(descriptors, names, strict=True)
        ):
            if descriptor:
                (pointer,) = reader.words(descriptor + offset, 1).tolist()
                records, readable = reader.read_records(percpu.at(pointer), 4)
                key = f"IPI{number}"
                found[key] = counts(column(records, 0, 4).astype(np.int64), readable)
                named[key] = read_string(reader, name, _TEXT_SIZE)
    except UNREADABLE as error:
        losses.lose(Loss.COUNTS, f"interrupts between CPUs cannot be read: {error}")
        return NO_IPIS
    calls = kinds.get("IPI_CALL_FUNC")
    return Ipis(found, named, None if calls is None else f"IPI{calls}")


# --- The CPUs' own interrupts, which are not of devices, and softirqs.
#
# arch/x86/kernel/irq.c, arch/arm64/kernel/smp.c and kernel/softirq.c. Other
# architectures count their own interrupts like those of devices.


# Columns: name in /proc/interrupts, in its order; ``+`` if it is included in ``intr``
# of /proc/stat (arch_irq_stat_cpu(), as of v6.12); member of ``irq_cpustat_t``, or
# variable; enumerator without IRQ_COUNT_, which replaces the member as of v7.2; text.
# A TLB flush is also counted as a function call (CAL), and a posted MSI as a device's
# interrupt.
_TABLE = """
NMI  + __nmi_count                   NMI                     Non-maskable
LOC  + apic_timer_irqs               APIC_TIMER              Local timer
SPU  + irq_spurious_count            SPURIOUS                Spurious
PMI  + apic_perf_irqs                APIC_PERF               Performance monitoring
IWI  + apic_irq_work_irqs            IRQ_WORK                IRQ work
RTR  + icr_read_retry_count          ICR_READ_RETRY          APIC ICR read retries
PLT  + x86_platform_ipis             X86_PLATFORM_IPI        Platform
RES  + irq_resched_count             RESCHEDULE              Rescheduling
CAL  + irq_call_count                CALL_FUNCTION           Function calls
TLB  - irq_tlb_count                 TLB                     TLB shootdowns
TRM  + irq_thermal_count             THERMAL_APIC            Thermal events
THR  + irq_threshold_count           THRESHOLD_APIC          APIC thresholds
DFR  - irq_deferred_error_count      DEFERRED_ERROR          Deferred APIC errors
MCE  + mce_exception_count           MCE_EXCEPTION           Machine check exceptions
MCP  + mce_poll_count                MCE_POLL                Machine check polls
HYP  + irq_hv_callback_count         HYPERVISOR_CALLBACK     Hypervisor callbacks
HRE  + irq_hv_reenlightenment_count  HYPERV_REENLIGHTENMENT  Hyper-V reenlightenment
HVS  + hyperv_stimer0_count          HYPERV_STIMER0          Hyper-V stimer0
ERR  - irq_err_count                 PIC_APIC_ERROR          PIC and APIC errors
MIS  - irq_mis_count                 IOAPIC_MISROUTED        Misrouted by the IO-APIC
PIN  - kvm_posted_intr_ipis          POSTED_INTR             Posted interrupts
NPI  - kvm_posted_intr_nested_ipis   POSTED_INTR_NESTED      Nested posted interrupts
PIW  - kvm_posted_intr_wakeup_ipis   POSTED_INTR_WAKEUP      Posted wake-ups
VPMI + perf_guest_mediated_pmis      PERF_GUEST_MEDIATED_PMI Mediated PMIs of guests
PMN  - posted_msi_notification_count POSTED_MSI_NOTIFICATION Notices of posted MSIs
"""

_FOR_ALL = {"ERR", "MIS"}
"""Kinds whose count is one variable for all CPUs, before v7.2."""

_FOR_EACH = {"MCE", "MCP"}
"""Kinds whose count is a per-CPU variable of its own, before v7.2."""

CALLS = "CAL"
FLUSHES = "TLB"


class _Kind(Struct, frozen=True):
    """One line of ``_TABLE``."""

    name: str
    adds: bool
    member: str
    enumerator: str
    text: str


def _kind(line: str) -> _Kind:
    name, sign, member, enumerator, text = line.split(maxsplit=4)
    return _Kind(name, sign == "+", member, enumerator, text)


_KINDS = [_kind(line) for line in _TABLE.strip().splitlines()]


class Vectors(Struct, frozen=True):
    """The CPUs' own interrupts, by name as in /proc/interrupts."""

    counts: Mapping[str, Counts]
    """Counts of each kind by CPU; they have 32 bits and wrap around."""

    totals: Mapping[str, int]
    """Counts of the kinds that the kernel does not count by CPU."""

    texts: Mapping[str, str] = field(default_factory=dict)
    """What each kind is for, where that is read from the kernel (arm64)."""

    calls_name: str = CALLS
    """Name of the kind for function calls."""

    @property
    def calls(self) -> Counts | None:
        """Each CPU's interrupts for function calls; ``None`` if not counted."""
        return self.counts.get(self.calls_name)

    @property
    def interrupts(self) -> Counts | None:
        """Each CPU's own interrupts that ``intr`` of /proc/stat includes; ``None`` if
        there are no counts of x86."""
        adding = [kind.name for kind in _KINDS if kind.adds]
        return total(self.counts[name] for name in adding if name in self.counts)


def read_vectors(reader: Reader, percpu: PerCpu, losses: LossLog) -> Vectors:
    """Read the counts of all kinds that this kernel keeps: on x86 and arm64 only."""
    ipis = read_ipis(reader, percpu, losses)
    if ipis.counts:
        return Vectors(ipis.counts, {}, ipis.texts, ipis.calls or CALLS)
    try:
        numbers = enumerators(reader.prog, "enum irq_stat_counts")
    except MissingError:
        numbers = Enumerators()
    members: Members = {
        kind.name: (*_element(kind, numbers), kind.member) for kind in _KINDS
    }
    try:
        addresses = percpu.addresses("irq_stat")
        stat = read_structs(reader, "irq_cpustat_t", members, addresses, losses)
    except MissingError:
        return Vectors({}, {})
    found = {kind.name: believed(stat, kind.name, losses) for kind in _KINDS}
    totals: dict[str, int] = {}
    if stat.columns and not numbers:
        for kind in _KINDS:
            # MCE and MCP are per-CPU variables. A kernel that counts THR (machine check
            # thresholds) has them; of another, their look-up would take long.
            if kind.name in _FOR_EACH and stat.has("THR"):
                found[kind.name] = _variable(reader, percpu, kind.member)
            elif kind.name in _FOR_ALL:
                totals |= _for_all(reader, kind, losses)
    known = {name: numbers for name, numbers in found.items() if numbers is not None}
    return Vectors(known, totals)


def _element(kind: _Kind, numbers: Mapping[str, int]) -> tuple[str, ...]:
    number = numbers.get(f"IRQ_COUNT_{kind.enumerator}")
    return () if number is None else (f"counts[{number}]",)


def _variable(reader: Reader, percpu: PerCpu, name: str) -> Counts | None:
    """Read a per-CPU counter of 32 bits; ``None`` if the kernel does not have it."""
    try:
        addresses = percpu.addresses(name)
    except MissingError:
        # Without CONFIG_X86_MCE.
        return None
    records, readable = reader.read_records(addresses, 4)
    return counts(column(records, 0, 4), readable)


def _for_all(reader: Reader, kind: _Kind, losses: LossLog) -> dict[str, int]:
    """Return a kind's count for all CPUs: an ``atomic_t``, which is not in BTF."""
    try:
        address = find_symbol(reader.prog, kind.member).address
        return {kind.name: int.from_bytes(reader.read(address, 4), "little")}
    except MissingError:
        # Without CONFIG_X86_IO_APIC.
        return {}
    except UNREADABLE as error:
        losses.lose(Loss.COUNTS, f"{kind.member} cannot be read: {error}")
        return {}


def vector_rows(vectors: Vectors, cpus: list[int]) -> tuple[Vector, ...]:
    """Return the rows of all kinds that this kernel counts, as in /proc/interrupts."""
    rows = []
    for kind in _KINDS:
        if kind.name in vectors.counts:
            rows.append(_row(kind.name, kind.text, vectors.counts[kind.name], cpus))
        elif kind.name in vectors.totals:
            total_ = vectors.totals[kind.name]
            rows.append(Vector(name=kind.name, text=kind.text, counts={}, total=total_))
    for name, text in vectors.texts.items():
        rows.append(_row(name, text, vectors.counts[name], cpus))
    return tuple(rows)


_SOFTIRQS = {
    "HI": "Tasklets of high priority",
    "TIMER": "Timers",
    "NET_TX": "Network transmission",
    "NET_RX": "Network reception",
    "BLOCK": "Block I/O that is done",
    "IRQ_POLL": "Polled block I/O",
    "TASKLET": "Tasklets",
    "SCHED": "Load balancing",
    "HRTIMER": "High-resolution timers",
    "RCU": "RCU callbacks",
}


_NAME_SIZE = 32
"""Limit for the length of a name."""


def softirq_names(reader: Reader, losses: LossLog) -> list[str]:
    """Return the names of softirqs in /proc/softirqs, by number."""
    prog = reader.prog
    count = (
        member_of(find_type(prog, "struct kernel_stat"), "softirqs").type.length or 0
    )
    try:
        # An array of pointers to strings. Looking up its type takes long.
        names = reader.words(
            find_symbol(prog, "softirq_to_name").address, count
        ).tolist()
        return [read_string(reader, name, _NAME_SIZE) for name in names]
    except LOST as error:
        # The kernel has not changed the order since there are ten.
        losses.note("softirq-names", f"names of softirqs are taken as known: {error}")
        known = list(_SOFTIRQS)
        return known[:count] + [f"softirq {n}" for n in range(len(known), count)]


def softirq_rows(softirqs: Mapping[str, Counts], cpus: list[int]) -> tuple[Vector, ...]:
    """Return the row of each softirq."""
    return tuple(
        _row(name, _SOFTIRQS.get(name, ""), numbers, cpus)
        for name, numbers in softirqs.items()
    )


def _row(name: str, text: str, numbers: Counts, cpus: list[int]) -> Vector:
    rows = numbers.values.nonzero()[0].tolist()
    by_cpu = {cpus[row]: int(numbers.values[row]) for row in rows}
    total_ = sum(by_cpu.values()) if numbers.known.all() else None
    return Vector(name=name, text=text, counts=by_cpu, total=total_)
