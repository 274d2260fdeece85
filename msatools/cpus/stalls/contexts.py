# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a CPU does, by its stack and registers in a dump. The analysis is pure."""

import re
from collections.abc import Iterator, Sequence

from msgspec import Struct

from msatools.cpus.stalls.model import Mode, Why
from msatools.tasks.runningstacks import ENTRIES, NMI
from msatools.tasks.waits import classify

_CRASHES = frozenset(
    {
        *("panic", "vpanic", "nmi_panic", "crash_kexec", "__crash_kexec"),
        *("machine_kexec", "oops_end", "die", "sysrq_handle_crash"),
    }
)
"""Functions that report a crash of the kernel."""

_HALTS = frozenset(
    {
        *("stop_this_cpu", "local_cpu_stop", "cpu_park_loop", "panic_smp_self_stop"),
        *("crash_smp_send_stop", "ipi_cpu_crash_stop"),
    }
)
"""Functions in which the CPUs stay that a crashing kernel stops."""

_TICKS = frozenset(
    {
        *("tick_sched_timer", "tick_nohz_handler", "tick_nohz_highres_handler"),
        *("tick_sched_handle", "update_process_times", "watchdog_timer_fn"),
    }
)
"""Functions that run in the timer interrupt of any CPU, now and then."""

_TIMER = "asm_sysvec_apic_timer"
"""Beginning of the name of the entry point of that interrupt; x86 only."""

_SOFTIRQS = frozenset({"__do_softirq", "handle_softirqs", "do_softirq"})
"""Functions that run softirqs."""

_SPINS = (
    *("native_queued_spin_lock_slowpath", "queued_spin_lock_slowpath"),
    *("__pv_queued_spin_lock_slowpath", "queued_read_lock_slowpath"),
    *("queued_write_lock_slowpath", "resilient_queued_spin_lock_slowpath"),
)
_CALLS = (
    *("smp_call_function", "__smp_call_function", "generic_exec_single"),
    *("csd_lock_wait", "__csd_lock_wait", "on_each_cpu"),
)
"""Prefixes of the functions that let other CPUs run a function, and wait."""

_STOPPED = ("multi_cpu_stop", "stop_machine_yield")

_LOCK_WORDS = re.compile(r"_*(raw_)?(spin|read|write)_(lock|trylock)\w*|do_raw_\w+")


class Context(Struct, frozen=True):
    """What a CPU does."""

    mode: Mode
    function: str | None
    """The innermost function that is not part of a spinlock or a cross call."""

    call: str | None
    """The system call."""

    why: Why | None
    """``None`` if the names alone do not tell."""

    crashed: bool
    """Whether the kernel reported its crash on this CPU."""

    halted: bool
    """Whether the crashing kernel has stopped this CPU for good."""

    frames: tuple[str, ...]
    """Functions of what it does, without those of the crash or an NMI."""

    skipped: int = 0
    """Number of frames above these."""


def interpret(
    names: Sequence[str],
    *,
    kthread: bool,
    late: bool,
    softirq: bool | None = None,
    interrupt: bool = False,
) -> Context:
    """Return what a CPU does by the functions on its stack. Pure.

    An NMI is how a crashing kernel stops other CPUs, and a tick comes now and then:
    what they have interrupted counts.

    :param names: Functions, the innermost first; user mode is ``""``.
    :param kthread: Whether the task is a kernel thread.
    :param late: Whether the CPU's timer interrupt is late: then a tick does not pass.
    :param softirq: Whether the CPU serves a softirq, by its count; ``None`` if unknown.
    :param interrupt: Whether the CPU is in an interrupt, by its count: a stack may end
        before the entry point.
    """
    parts = list(_parts(names))
    crashed, skipped = False, 0
    halted = bool(parts) and bool(_HALTS.intersection(parts[0]))
    while len(parts) > 1 and (_is_nmi(parts[0]) or _is_passing(parts[0], late)):
        crashed |= bool(_CRASHES.intersection(parts[0]))
        skipped += len(parts.pop(0))
    frames = parts[0] if parts else []
    crashed |= bool(_CRASHES.intersection(frames))
    is_entered = bool(frames) and frames[-1].startswith(ENTRIES)
    # An interrupt that was skipped is in the count, too.
    is_entered |= interrupt and not skipped and len(parts) == 1 and frames[:1] != [""]
    in_softirq = bool(_SOFTIRQS.intersection(frames)) if softirq is None else softirq
    mode: Mode = "task"
    if frames and not frames[0]:
        mode = "user"
    elif frames and _is_nmi(frames):
        mode = "nmi"
    elif _SOFTIRQS.intersection(frames) and in_softirq:
        mode = "softirq"
    elif is_entered:
        mode = "interrupt"
    call = None
    if not kthread:
        of_task = [name for name in parts[-1] if name] if parts else []
        call = classify(tuple(of_task)).call if of_task else None
    return Context(
        mode=mode,
        function=_function(frames),
        call=call,
        why=_why(frames, mode, kthread=kthread, call=call),
        crashed=crashed,
        halted=halted,
        frames=tuple(name for name in frames if name),
        skipped=skipped,
    )


def _parts(names: Sequence[str]) -> Iterator[list[str]]:
    """Split a stack where something was interrupted; each part ends with an entry."""
    part: list[str] = []
    for name in names:
        part.append(_plain(name))
        if name.startswith(ENTRIES):
            yield part
            part = []
    if part:
        yield part


def _plain(name: str) -> str:
    """Return a function's name without suffixes of the compiler."""
    return name.partition(".")[0]


def _is_nmi(part: Sequence[str]) -> bool:
    return part[-1].startswith(NMI)


def _is_passing(part: Sequence[str], late: bool) -> bool:
    """Return whether what interrupted a CPU would have been over soon, or a crash."""
    if not part[-1].startswith(ENTRIES) or _SOFTIRQS.intersection(part):
        return False
    if (_CRASHES | _HALTS).intersection(part):
        return True
    if late:
        return False
    return part[-1].startswith(_TIMER) or bool(_TICKS.intersection(part))


def _function(frames: Sequence[str]) -> str | None:
    for name in frames:
        if not name or name in _SPINS or name.startswith(_CALLS):
            continue
        if not _LOCK_WORDS.fullmatch(name):
            return name
    return None


def _why(
    frames: Sequence[str], mode: Mode, *, kthread: bool, call: str | None
) -> Why | None:
    found = {*frames}
    if found.intersection(_SPINS):
        return "spins-for-lock"
    if any(name.startswith(_CALLS) for name in frames):
        return "waits-for-call"
    if found.intersection(_STOPPED):
        return "stopped"
    if found.intersection(_CRASHES | _HALTS):
        return "panic"
    if mode == "softirq":
        return "softirq"
    if mode == "interrupt":
        return "interrupt"
    if mode == "user":
        return "user-mode"
    if not frames:
        return None
    if kthread:
        return "kernel-thread"
    return "system-call" if call else None
