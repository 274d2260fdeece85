# SPDX-License-Identifier: LGPL-2.1-or-later

"""stop_machine(): CPUs that have stopped, and those that are awaited.

kernel/stop_machine.c: the stopper thread of each CPU takes ``multi_cpu_stop()`` off the
list of its works, and spins in it until all others are there.
"""

from collections.abc import Callable

from msatools.cpus.stalls.model import StopMachine
from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, find_offset, read_struct, read_structs
from msatools.selfdesc.find import find_type

_STOPPER: Members = {
    "first": ("works.next",),
    # Since a8b62fd08505 ("stop_machine: Add function and caller debug info") (in
    # v5.11); before, who has stopped is not recorded.
    "function": ("fn",),
}
_WORK: Members = {
    "next": ("list.next",),
    "function": ("fn",),
    "argument": ("arg",),
}
_DATA: Members = {"function": ("fn",), "state": ("state",)}

_STEPS = (None, "prepare", "disable-irq", "run", "exit")
"""``enum multi_stop_state``."""

_MAX_WORKS = 16
_STOP = "multi_cpu_stop"


def read_stop_machine(
    reader: Reader,
    percpu: PerCpu,
    name: Callable[[int], str | None],
    losses: LossLog,
) -> StopMachine | None:
    """Return the CPUs that stop; ``None`` if nothing stops them.

    ``since_ns`` is for the caller to know.

    :param name: Returns the function at an address.
    """
    try:
        addresses = percpu.addresses("cpu_stopper")
        stoppers = read_structs(
            reader, "struct cpu_stopper", _STOPPER, addresses, losses
        )
        works = find_offset(find_type(reader.prog, "struct cpu_stopper"), ("works",))
    except MissingError:
        return None
    if works is None or not stoppers.has("first"):
        return None
    stopped, missing, data = [], [], 0
    for row, cpu in enumerate(percpu.cpus.tolist()):
        if not stoppers.readable[row]:
            continue
        runs = int(stoppers["function"][row]) if stoppers.has("function") else 0
        if runs and name(runs) == _STOP:
            stopped.append(cpu)
            continue
        head, first = int(addresses[row]) + works, int(stoppers["first"][row])
        if first not in (0, head):
            argument = _awaited(reader, head, first, name, losses)
            if argument:
                data = argument
                missing.append(cpu)
    if not stopped and not missing:
        return None
    function, step = _read_data(reader, data, name, losses)
    return StopMachine(
        function=function,
        step=step,
        stopped=tuple(stopped),
        missing=tuple(missing),
        since_ns=None,
    )


def _awaited(
    reader: Reader,
    head: int,
    first: int,
    name: Callable[[int], str | None],
    losses: LossLog,
) -> int:
    """Return the argument of ``multi_cpu_stop()`` if a CPU is to run it; else 0."""
    node = first
    try:
        for _ in range(_MAX_WORKS):
            if node in (0, head):
                return 0
            work = read_struct(reader, "struct cpu_stop_work", _WORK, node)
            if name(work["function"]) == _STOP:
                return int(work["argument"])
            node = work["next"]
    except LOST as error:
        losses.lose(Loss.LISTS, f"cannot determine what stops CPUs: {error}")
    return 0


def _read_data(
    reader: Reader, address: int, name: Callable[[int], str | None], losses: LossLog
) -> tuple[str | None, str | None]:
    """Return what is to run while CPUs are stopped, and how far they are."""
    if not address:
        return None, None
    try:
        data = read_struct(reader, "struct multi_stop_data", _DATA, address)
    except MissingError:
        return None, None
    except UNREADABLE as error:
        losses.lose(Loss.VARIABLES, f"cannot determine what CPUs stop for: {error}")
        return None, None
    state = data["state"]
    step = _STEPS[state] if 0 <= state < len(_STEPS) else None
    return name(data["function"]), step
