# SPDX-License-Identifier: LGPL-2.1-or-later

"""
The network devices whose packets CPUs receive (net/core/dev.c).

The ``struct napi_struct`` of a device that has packets is in its CPU's poll list;
packets of devices without one wait in the CPU's own backlog. Between two packets of a
flood both are empty. Then the stack that the CPU's interrupts and softirqs share still
has pointers to the ``struct napi_struct`` that the CPU polled last.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Reader, read_string
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import Members, read_structs
from msatools.kernel.walks import list_nodes
from msatools.program.linear import KERNEL_HALF
from msatools.selfdesc.find import find_symbol, find_type, object_at, offset_of
from msatools.tasks.unwind import stack_bytes

_NAME_BYTES = 16
"""IFNAMSIZ"""

_MAX_NAMESPACES = 1024
_MAX_DEVICES = 4096
_MAX_QUEUES = 256
_MAX_CPUS = 8192
_IRQ_STACK_BYTES = 16384
"""IRQ_STACK_SIZE of x86 and arm64, without KASAN."""

_COUNTS: Members = {
    "processed": ("processed",),
    "dropped": ("dropped",),
    # Instead of ``dropped``, by the parity of the NUMA node (seen in 7.3)
    "even": ("drop_counters.drops0",),
    "odd": ("drop_counters.drops1",),
}


class Poll(Struct, frozen=True):
    """A poll of a network device for packets, by ``struct napi_struct``."""

    function: int
    """Address of the driver's poll function, or of that of the CPU's backlog."""

    device: str | None
    """Name of the network device; ``None`` if unknown."""


class PacketCounts(Struct, frozen=True):
    """Packets of one CPU, as in /proc/net/softnet_stat."""

    processed: int
    dropped: int
    """Packets for which the CPU's backlog had no room."""


_WRAP = 1 << 32
"""Modulus of the counts: they have 32 bits, in some kernels with a sign."""


def packets_delta(
    before: Mapping[int, PacketCounts], after: Mapping[int, PacketCounts]
) -> dict[int, PacketCounts]:
    """Return the packets between two samples by CPU, of CPUs that are in both."""
    return {
        cpu: PacketCounts(
            (now.processed - was.processed) % _WRAP,
            (now.dropped - was.dropped) % _WRAP,
        )
        for cpu, now in after.items()
        if (was := before.get(cpu)) is not None
    }


class Polls:
    """Finds the network devices that CPUs poll; reads nothing before it is asked."""

    def __init__(self, reader: Reader, percpu: PerCpu, losses: LossLog) -> None:
        self._reader = reader
        self._prog = reader.prog
        self._percpu = percpu
        self._losses = losses

    def of(self, cpu: int, task: int) -> Poll | None:
        """Return the next poll of a CPU, else in a dump its last one; ``None`` if
        neither is known.

        :param task: Address of the ``struct task_struct`` that the CPU runs.
        :raises drgn.FaultError: if the poll list cannot be read
        :raises MissingError: if the types are unknown
        """
        data = self._data(cpu)
        head = int(data.poll_list.address_of_())
        first = int(data.poll_list.next)
        if first >= KERNEL_HALF and first != head:
            return self._poll(cpu, data, first - self._offset("poll_list"))
        last = self._last(cpu, task, int(data.backlog.address_of_()))
        return None if last is None else self._poll(cpu, data, last)

    def backlog(self, cpu: int) -> Poll:
        """Return the poll of a CPU's own backlog, and the device of its first packet.

        :raises drgn.FaultError: if it cannot be read
        :raises MissingError: if the types are unknown
        """
        data = self._data(cpu)
        return Poll(int(data.backlog.poll), self._of_backlog(data))

    def counts(self) -> dict[int, PacketCounts]:
        """Return the packets since boot by CPU; empty if the kernel has no counts."""
        try:
            addresses = self._percpu.addresses("softnet_data")
            found = read_structs(
                self._reader, "struct softnet_data", _COUNTS, addresses, self._losses
            )
        except MissingError:
            return {}
        drops = [name for name in ("dropped", "even", "odd") if found.has(name)]
        if not found.has("processed") or not drops:
            return {}
        rows = np.flatnonzero(found.readable).tolist()
        return {
            int(self._percpu.cpus[row]): PacketCounts(
                int(found["processed"][row]),
                sum(int(found[name][row]) for name in drops),
            )
            for row in rows
        }

    def _poll(self, cpu: int, data: drgn.Object, address: int) -> Poll:
        napi = object_at(self._prog, "struct napi_struct", address)
        if address == int(data.backlog.address_of_()):
            device = self._of_backlog(data) or self._steered.get(cpu)
            return Poll(int(napi.poll), device)
        return Poll(int(napi.poll), self._device_name(int(napi.dev)))

    def _of_backlog(self, data: drgn.Object) -> str | None:
        """Return the device of the first packet in a backlog; ``None`` if unknown."""
        for queue in (data.process_queue, data.input_pkt_queue):
            first = queue.next
            if int(first) >= KERNEL_HALF and int(first) != int(queue.address_of_()):
                return self._device_name(int(first.dev))
        return None

    def _device_name(self, device: int) -> str | None:
        if device < KERNEL_HALF:
            return None
        offset = offset_of(find_type(self._prog, "struct net_device"), "name")
        return read_string(self._reader, device + offset, _NAME_BYTES) or None

    def _data(self, cpu: int) -> drgn.Object:
        address = self._of_cpu("softnet_data", cpu)
        return object_at(self._prog, "struct softnet_data", address)

    def _of_cpu(self, variable: str, cpu: int) -> int:
        row = self._percpu.cpus.tolist().index(cpu)
        return int(self._percpu.addresses(variable)[row])

    def _offset(self, member: str) -> int:
        return offset_of(find_type(self._prog, "struct napi_struct"), member)

    def _last(self, cpu: int, task: int, backlog: int) -> int | None:
        """Return the address of the ``struct napi_struct`` that most words of a CPU's
        stacks point to; ``None`` if no one has most, or on a live kernel."""
        if self._reader.is_live:
            return None  # stacks change as they are read
        known = np.array([backlog, *self._known], np.uint64)
        words = np.concatenate([*self._stacks(cpu, task), np.zeros(0, np.uint64)])
        found = Counter(words[np.isin(words, known)].tolist())
        first, second = (*found.most_common(2), (0, 0), (0, 0))[:2]
        return first[0] if first[1] > second[1] else None

    def _stacks(self, cpu: int, task: int) -> Iterator[npt.NDArray[np.uint64]]:
        """Yield the words of the stacks of a CPU's task and of its interrupts."""
        own = object_at(self._prog, "struct task_struct", task).stack
        ranges = [(int(own), stack_bytes(self._prog))]
        if (start := self._interrupt_stack(cpu)) is not None:
            ranges.append((start, _IRQ_STACK_BYTES))
        for start, size in ranges:
            try:
                yield self._reader.words(start, size // 8)
            except UNREADABLE:
                continue

    def _interrupt_stack(self, cpu: int) -> int | None:
        """Return the start of the stack of a CPU's interrupts and softirqs; ``None`` if
        not found.

        arch/x86/kernel/irq_64.c: the kernel's pointer is to the last word.
        """
        try:
            # "x86/percpu: Move irq_stack variables next to current_task" (in v6.2)
            # put it into ``pcpu_hot``, which v6.15 removed.
            offset = offset_of(
                find_type(self._prog, "struct pcpu_hot"), "hardirq_stack_ptr"
            )
            place = self._of_cpu("pcpu_hot", cpu) + offset
        except MissingError:
            try:
                place = self._of_cpu("hardirq_stack_ptr", cpu)
            except MissingError:
                return self._interrupt_stack_of_arm64(cpu)
        end = int(self._reader.words(place, 1)[0])
        return end + 8 - _IRQ_STACK_BYTES if end >= KERNEL_HALF else None

    def _interrupt_stack_of_arm64(self, cpu: int) -> int | None:
        try:
            place = self._of_cpu("irq_stack_ptr", cpu)
        except MissingError:
            return None
        start = int(self._reader.words(place, 1)[0])
        return start if start >= KERNEL_HALF else None

    @cached_property
    def _known(self) -> tuple[int, ...]:
        """The addresses of the ``struct napi_struct`` of all devices."""
        try:
            return tuple(self._polls())
        except LOST as error:
            self._losses.lose(Loss.LISTS, f"cannot read network devices: {error}")
            return ()

    @cached_property
    def _steered(self) -> dict[int, str]:
        """Maps a CPU to the name of the device whose packets are steered to it (RPS);
        without CPUs to which several are."""
        found: dict[int, set[str]] = {}
        try:
            for device in self._devices:
                for cpu in self._receivers(device):
                    found.setdefault(cpu, set()).add(self._device_name(device) or "")
        except LOST as error:
            self._losses.lose(Loss.LISTS, f"cannot read network devices: {error}")
        return {
            cpu: next(iter(names)) for cpu, names in found.items() if len(names) == 1
        }

    def _receivers(self, address: int) -> Iterator[int]:
        """Yield the CPUs to which the packets of a device are steered."""
        queue = find_type(self._prog, "struct netdev_rx_queue")
        if not queue.has_member("rps_map"):
            return  # CONFIG_RPS=n
        device = object_at(self._prog, "struct net_device", address)
        for number in range(min(int(device.num_rx_queues), _MAX_QUEUES)):
            steers = device._rx[number].rps_map
            if int(steers) >= KERNEL_HALF:
                for place in range(min(int(steers.len), _MAX_CPUS)):
                    yield int(steers.cpus[place])

    def _polls(self) -> Iterator[int]:
        device = find_type(self._prog, "struct net_device")
        polls = offset_of(device, "napi_list")
        for one in self._devices:
            yield from self._nodes(one + polls, self._offset("dev_list"))

    @cached_property
    def _devices(self) -> tuple[int, ...]:
        """The devices of all namespaces.

        :raises MissingError: if their types are unknown
        """
        namespaces = find_symbol(self._prog, "net_namespace_list").address
        net = find_type(self._prog, "struct net")
        device = find_type(self._prog, "struct net_device")
        devices = offset_of(net, "dev_base_head")
        found: list[int] = []
        for each in self._nodes(namespaces, offset_of(net, "list"))[:_MAX_NAMESPACES]:
            found += self._nodes(each + devices, offset_of(device, "dev_list"))
        return tuple(found[:_MAX_DEVICES])

    def _nodes(self, head: int, offset: int) -> list[int]:
        """Return the addresses of a list's structures, which have their node at
        *offset*."""
        nodes = list_nodes(self._reader, head, self._losses, "network devices")
        return [int(node) - offset for node in nodes.tolist()]
