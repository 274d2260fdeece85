# SPDX-License-Identifier: LGPL-2.1-or-later

"""Interrupts agree with the guest's record and with drgn."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from drgn import Object, Program
from drgn.helpers.linux.cpumask import for_each_cpu, for_each_possible_cpu
from drgn.helpers.linux.irq import (
    for_each_irq_desc,
    irq_desc_action_names,
    irq_desc_affinity_mask,
    irq_desc_chip_name,
    irq_desc_kstat_cpu,
)
from msgspec.structs import replace

from fixtures import lab
from msatools.cpus.irqs import (
    IrqTable,
    delta,
    irqs,
    no_intr_cpus,
    percpu_interrupts,
    read_irqs,
    route,
)
from msatools.cpus.model import CpuSet
from msatools.kernel.percpu import cpus_of, read_percpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from tests.cpus.damaged import lose, put
from tests.cpus.guests import KERNELS, Guest
from tests.cpus.setdumps import set_of
from tests.support.dumps import TYPES, open_dump
from tests.truth import tables


@dataclass
class Seen(Guest):
    table: IrqTable
    losses: LossLog
    reads: int

    def row(self, name: str) -> int:
        (row,) = [row for row, names in enumerate(self.table.names) if name in names]
        return row

    @property
    def lines(self) -> dict[int, str]:
        """Number -> the rest of the line in /proc/interrupts after the counts."""
        head, *lines = self.truth("proc/interrupts").splitlines()
        found = {}
        for line in lines:
            name, _, rest = line.partition(":")
            if name.strip().isdigit():
                words = rest.split(maxsplit=len(head.split()))
                found[int(name)] = " ".join(words[-1].split())
        return found


def read(prog: Program) -> tuple[IrqTable, LossLog, int]:
    reader, losses = Reader(prog), LossLog()
    percpu = read_percpu(Reader(prog), losses)
    table = read_irqs(reader, percpu, losses)
    return table, losses, reader.reads


@lru_cache(maxsize=4)
def seen(name: str, types: str) -> Seen:
    return Seen(lab.build(name), *read(open_dump(name, types)))


@pytest.fixture(params=KERNELS)
def dump(request: pytest.FixtureRequest) -> Seen:
    return seen(f"cpus-{request.param}", "btf")


def test_nothing_is_lost(dump: Seen) -> None:
    assert not dump.losses.notes
    assert dump.table.complete
    assert dump.losses.coverage["irqs"] == len(dump.table)


def test_managed_interrupts(dump: Seen) -> None:
    made = dump.run.workload["irqs"]
    managed = {name for name, irq in made.items() if irq["managed"]}
    table = dump.table
    names = [table.names[row] for row in np.flatnonzero(table.managed).tolist()]
    assert len(managed) > 8
    assert {name for queue in names for name in queue} == managed
    assert not (table.managed & table.movable).any()


def test_movable_interrupts(dump: Seen) -> None:
    table = dump.table
    assert not table.movable[dump.row("timer")]  # IRQF_NOBALANCING
    assert all(table.movable[dump.row(name)] for name in ("ttyS0", "virtio0-input.0"))


def test_handlers_are_those_of_drgn(dump: Seen) -> None:
    """By debug info, on the same dump."""
    prog = tables.open_dump(dump.run.name, "dwarf")
    checked = 0
    for row, functions in enumerate(dump.table.functions):
        address = int(dump.table.address[row])
        action = Object(prog, "struct irq_desc", address=address).action
        for function in functions:
            handler = action.handler
            if prog.symbol(handler.value_()).name == "irq_default_primary_handler":
                handler = action.thread_fn
            assert function == handler.value_()
            checked += 1
            action = action.next
    assert checked > 8


def test_interrupts_are_as_in_proc(dump: Seen) -> None:
    """Numbers, controllers and names are exactly those in /proc/interrupts."""
    table = dump.table
    found = {
        int(table.irq[row]): f"{table.chip[row]} {table.hwirq[row]}-{table.flow[row]} "
        + ", ".join(table.names[row])
        for row in np.flatnonzero(table.listed).tolist()
    }
    assert found == dump.lines
    shown = {irq.irq: (irq.chip, irq.name) for irq in irqs(table)}
    for irq, (chip, name) in shown.items():
        assert found[irq].startswith(f"{chip} ")
        assert found[irq].endswith(f" {name}")
    assert shown.keys() == found.keys()


def cpu_set(*cpus: int) -> CpuSet:
    return set_of("made", "root", cpus)


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize(
    "name", ["memory-5.10", "tasks-6.1", "tasks-6.12", "cpus-6.1", "cpus-6.12"]
)
def test_interrupts_are_as_in_drgn(name: str, types: str) -> None:
    prog = open_dump(name, types)
    table, losses, _ = read(prog)
    assert not losses.notes
    found = list(for_each_irq_desc(prog))
    assert table.irq.tolist() == [irq for irq, _ in found]
    cpus = list(for_each_possible_cpu(prog))
    assert table.cpus.tolist() == cpus
    moving = prog.constant("IRQD_SETAFFINITY_PENDING")
    for row, (_, desc) in enumerate(found):
        assert table.address[row] == desc.value_()
        names = [name.decode() for name in irq_desc_action_names(desc)]
        assert list(table.names[row]) == names
        chip = irq_desc_chip_name(desc)
        assert table.chip[row] == (chip.decode() if chip else None)
        # An affinity set since the last interrupt is still pending.
        is_moving = desc.irq_common_data.state_use_accessors & moving
        mask = desc.pending_mask if is_moving else irq_desc_affinity_mask(desc)
        assert list(cpus_of(table.affinity[row])) == list(for_each_cpu(mask[0]))
        effective = desc.irq_common_data.effective_affinity
        assert list(cpus_of(table.effective[row])) == list(for_each_cpu(effective[0]))
        counts = [irq_desc_kstat_cpu(desc, cpu) for cpu in cpus]
        assert table.counts[row].tolist() == counts


def test_cost(dump: Seen) -> None:
    """Nodes, masks and names take few reads, descriptors and counts one each."""
    cpus, rows = len(dump.table.cpus), len(dump.table)
    assert dump.reads < 2 * rows + 4 * cpus


# --- damage


def offset(prog: Program, member: str) -> int:
    desc = prog.type("struct irq_desc")
    found: int = desc.member(member).offset
    return found


@pytest.mark.parametrize("how", ["gone", "another"])
def test_invalid_interrupt(program: Program, how: str) -> None:
    whole = seen("cpus-6.12", "btf").table
    address = int(whole.address[-1])
    if how == "gone":
        lose(program, address, program.type("struct irq_desc").size)
    else:
        number = address + offset(program, "irq_data") + 4
        put(program, number, (9999).to_bytes(4, "little"))
    table, losses, _ = read(program)
    assert table.irq.tolist() == whole.irq.tolist()[:-1]
    assert table.address.tolist() == whole.address.tolist()[:-1]
    assert not table.complete
    assert losses.notes
    # Its target is unknown.
    nowhere = replace(table, affinity=np.zeros_like(table.affinity))
    assert no_intr_cpus(nowhere, tuple(table.cpus.tolist())) == set()


def test_missing_tree(program: Program) -> None:
    lose(program, program["sparse_irqs"].address_, 16)
    table, losses, _ = read(program)
    assert len(table) == 0
    assert not table.complete
    assert losses.coverage["trees_broken"] == 1
    assert irqs(table) == ()
    assert no_intr_cpus(table, (0, 1)) == set()
    (routed,) = route((cpu_set(0, 1),), table, (0, 1))
    assert routed.irqs_routed == ()


def test_unreadable_affinity_allows_all_cpus(program: Program) -> None:
    whole = seen("cpus-6.12", "btf")
    row = whole.row("virtio0-input.0")
    desc = int(whole.table.address[row]) + offset(program, "irq_common_data")
    common = program.type("struct irq_common_data")
    put(program, desc + common.member("affinity").offset, (8).to_bytes(8, "little"))
    table, losses, _ = read(program)
    assert table.affinity[row].all()
    assert losses.coverage["irq_affinity_unreadable"] == 1
    assert losses.notes
    assert no_intr_cpus(table, whole.online) == set()


def test_unreadable_controller_is_taken_as_movable(program: Program) -> None:
    whole = seen("cpus-6.12", "btf")
    row = whole.row("virtio0-input.0")
    desc = int(whole.table.address[row]) + offset(program, "irq_data")
    chip = desc + program.type("struct irq_data").member("chip").offset
    put(program, chip, (8).to_bytes(8, "little"))
    table, losses, _ = read(program)
    assert table.chip[row] is None
    assert table.movable[row]
    assert losses.coverage["irq_chip_unreadable"] == 1


@pytest.mark.parametrize("member", ["name", "next"])
def test_damaged_handlers(program: Program, member: str) -> None:
    whole = seen("cpus-6.12", "btf")
    row = whole.row("virtio0-input.0")
    desc = int(whole.table.address[row]) + offset(program, "action")
    action = program.read_u64(desc)
    address = action + program.type("struct irqaction").member(member).offset
    # An invalid name pointer, or a loop of handlers.
    value = 8 if member == "name" else action
    put(program, address, value.to_bytes(8, "little"))
    table, losses, _ = read(program)
    names = table.names[row]
    assert set(names) == (set() if member == "name" else {"virtio0-input.0"})
    assert losses.notes
    assert np.array_equal(table.counts, whole.table.counts)


def test_unreadable_counts(program: Program) -> None:
    whole = seen("cpus-6.12", "btf")
    row = whole.row("virtio0-input.0")
    desc = int(whole.table.address[row]) + offset(program, "kstat_irqs")
    percpu = read_percpu(Reader(program), LossLog())
    lose(program, int(percpu.at(program.read_u64(desc))[2]), 4)
    table, losses, _ = read(program)
    assert table.counts[row, 2] == 0 < whole.table.counts[row, 2]
    assert losses.coverage["irq_counts_unreadable"] == 1
    assert table.counted.sum() == len(table) - 1
    assert not table.counted[row]
    # Earlier counts are not new.
    came = delta(table, whole.table)
    assert not came.counts.any()
    assert not came.counted[row]
    assert np.array_equal(
        np.delete(table.counts, row, 0), np.delete(whole.table.counts, row, 0)
    )


# --- tables made by hand


def made(**columns: Any) -> IrqTable:
    """Make two interrupts, each on one of two CPUs and allowed on both."""
    both = np.ones(2, np.bool_)
    values = {
        "cpus": np.arange(2),
        "irq": np.array([10, 11]),
        "address": np.array([0x1000, 0x2000], np.uint64),
        "names": (("disk",), ("eth0", "eth1")),
        "chip": ("made", None),
        "hwirq": np.array([0, 1], np.uint64),
        "flow": ("edge", None),
        "affinity": np.ones((2, 2), np.bool_),
        "effective": np.eye(2, dtype=np.bool_),
        "counts": np.array([[30, 0], [0, 10]]),
        **dict.fromkeys(("handled", "device", "movable", "started", "counted"), both),
        **dict.fromkeys(("chained", "nested", "managed", "hidden", "disabled"), ~both),
        "complete": True,
    }
    return IrqTable(**(values | columns))


def test_others_than_devices() -> None:
    table = made(device=np.array([True, False]))
    assert [irq.irq for irq in irqs(table)] == [10]
    (timer,) = percpu_interrupts(table)
    assert (timer.name, timer.text, timer.counts) == ("11", "eth0, eth1", {1: 10})
    nowhere = replace(table, affinity=np.array([[True, False], [True, True]]))
    assert no_intr_cpus(nowhere, (0, 1)) == {1}


def test_hidden_chained_and_nested_interrupts() -> None:
    one = np.array([True, False])
    assert [irq.irq for irq in irqs(made(hidden=one))] == [11]
    none = np.zeros((2, 2), np.int64)
    chained = made(chained=one, counts=none, affinity=np.eye(2, dtype=np.bool_))
    assert [irq.irq for irq in irqs(chained)] == [11]
    # It occurs on the CPU nevertheless.
    assert no_intr_cpus(chained, (0, 1)) == set()
    (routed,) = route((cpu_set(0, 1),), made(nested=one), (0, 1))
    assert routed.irqs_routed == (11,)


def test_managed_queue_of_one_cpu_counts_if_it_occurred() -> None:
    kept = {"managed": np.ones(2, np.bool_), "movable": np.zeros(2, np.bool_)}
    table = made(affinity=np.eye(2, dtype=np.bool_), **kept)
    assert no_intr_cpus(table, (0, 1)) == {0, 1}
    assert no_intr_cpus(delta(table, table), (0, 1)) == {0, 1}
    later = table.counts + np.array([[1, 0], [0, 0]])
    came = delta(table, replace(table, counts=later))
    assert no_intr_cpus(came, (0, 1)) == {1}
    # Shared ones go to one of their CPUs.
    shared = made(**kept)
    assert no_intr_cpus(shared, (0, 1)) == set()
    assert no_intr_cpus(shared, (0,)) == {0}


def test_routed_and_allowed_interrupts() -> None:
    first = np.array([True, False])
    sets = (cpu_set(0), cpu_set(1), cpu_set(7))
    found = route(sets, made(managed=first), (0, 1))
    assert [each.irqs_routed for each in found] == [(10,), (11,), ()]
    assert [each.irqs_allowed for each in found] == [(10, 11), (10, 11), ()]
    assert [each.irqs_managed for each in found] == [1, 1, 0]
    # A shut down interrupt is allowed, but not routed.
    down = route(sets, made(started=~first), (0, 1))
    assert [each.irqs_routed for each in down] == [(), (11,), ()]
    assert down[0].irqs_allowed == (10, 11)
    # An interrupt moved since it last occurred is pending, if it can be moved.
    away = np.array([[False, True], [True, True]])
    on_its_way = made(affinity=away)
    for table, routed in (
        (on_its_way, ()),
        (replace(on_its_way, movable=~first), (10,)),
    ):
        assert route(sets, table, (0, 1))[0].irqs_routed == routed


def test_added_and_removed_interrupts() -> None:
    after = made(
        irq=np.array([11, 12]),
        address=np.array([0x2000, 0x4000], np.uint64),
        counts=np.array([[0, 11], [7, 0]]),
    )
    came = delta(made(), after)
    assert came.irq.tolist() == [11, 12]
    assert came.counts.tolist() == [[0, 1], [7, 0]]
