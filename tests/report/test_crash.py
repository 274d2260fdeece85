# SPDX-License-Identifier: LGPL-2.1-or-later

"""Which event of the log a kernel died of, for what the lab's guests do not do."""

import pytest

from msatools.program.description import LogRecord
from msatools.report.crash import CrashLog, at_fault
from msatools.report.log import PANIC, Event, faulting, parse_events

SECOND = 1_000_000_000
NULL = "BUG: kernel NULL pointer dereference, address: 0000000000000040"
PAGE = "BUG: unable to handle page fault for address: ffff8fffffff0000"


def oops(
    first: str, *, pid: int = 7, function: str = "f", cpu: int = 0
) -> tuple[str, ...]:
    """Return the lines of an oops."""
    return (
        first,
        "Oops: 0000 [#1] PREEMPT SMP NOPTI",
        f"CPU: {cpu} PID: {pid} Comm: a Not tainted 6.1.0 #1",
        f"RIP: 0010:{function}+0x1/0x2",
        "Call Trace:",
        " caller+0x3/0x4",
        "---[ end trace 0000000000000000 ]---",
    )


def crash_log(*lines: tuple[int, str]) -> CrashLog:
    """Return the log with lines at a second each."""
    records = [LogRecord(at * SECOND, 4, line, 1, None) for at, line in lines]
    return CrashLog(
        events=parse_events(records),
        oom=None,
        end_ns=records[-1].time_ns if records else 0,
    )


def at(second: int, lines: tuple[str, ...]) -> list[tuple[int, str]]:
    return [(second, line) for line in lines]


def blamed(log: CrashLog) -> Event | None:
    panic = next((event for event in log.events if event.is_panic), None)
    return at_fault(panic, log)


def function_of(event: Event | None) -> str | None:
    assert event is not None
    assert event.backtrace is not None
    return faulting(event.backtrace.frames, event.cause)[0].function


@pytest.mark.parametrize(
    "words",
    [
        "Fatal exception",
        "Fatal exception in interrupt",
        "Oops: Fatal exception",
        "Aiee, killing interrupt handler!",
        "Attempted to kill the idle task!",
        "Machine halted.",
    ],
)
def test_second_oops_is_fatal(words: str) -> None:
    log = crash_log(
        *at(100, oops(NULL, function="survived")),
        *at(900, oops(PAGE, function="fatal")),
        (901, PANIC + words),
    )
    event = blamed(log)
    assert event is not None
    assert (event.cause, function_of(event)) == ("page-fault", "fatal")


def test_sysrq_long_after_an_oops() -> None:
    log = crash_log(*at(100, oops(NULL)), (900, f"{PANIC}sysrq triggered crash"))
    event = blamed(log)
    assert event is not None
    assert event.cause == "sysrq"


def test_fault_within_panic() -> None:
    """The first panic names the cause, and not what panic() itself met."""
    log = crash_log(
        (10, f"{PANIC}Out of memory: system-wide panic_on_oom is enabled"),
        *at(11, oops(NULL)),
        (12, f"{PANIC}Fatal exception"),
    )
    event = blamed(log)
    assert event is not None
    assert event.cause == "out-of-memory"


def test_oops_without_panic() -> None:
    """With a capture kernel; the log ends with it."""
    log = crash_log(*at(100, oops(NULL)), *at(900, oops(PAGE)))
    event = blamed(log)
    assert event is not None
    assert event.cause == "page-fault"


def test_old_oops_without_panic() -> None:
    """Long before the end of the log: the machine was lost by something else."""
    log = crash_log(*at(100, oops(NULL)), (900, "usb 1-1: new device"))
    assert blamed(log) is None


@pytest.mark.parametrize(("pid", "cause"), [(1, "page-fault"), (7, "init-killed")])
def test_init_that_ends_by_an_oops(pid: int, cause: str) -> None:
    log = crash_log(
        *at(100, oops(PAGE, pid=pid)),
        (101, f"{PANIC}Attempted to kill init! exitcode=0x00000009"),
    )
    event = blamed(log)
    assert event is not None
    assert event.cause == cause


@pytest.mark.parametrize(
    ("first", "words", "cause"),
    [
        ("BUG: KASAN: use-after-free in f+0x1/0x2", "KASAN: panic_on_warn set ...", 0),
        ("BUG: KASAN: use-after-free in f+0x1/0x2", "kasan.fault=panic set ...", 0),
        ("BUG: KFENCE: out-of-bounds read in f+0x1/0x2", "KFENCE: panic_on_warn ", 0),
        ("WARNING: CPU: 0 PID: 7 at a.c:1 f+0x1", "kernel: panic_on_warn set ...", 1),
        ("UBSAN: shift-out-of-bounds in a.c:1:2", "UBSAN: panic_on_warn set ...", 1),
        (
            "BUG: scheduling while atomic: a/7/0x00000002",
            "scheduling while atomic: panic_on_warn set ...",
            2,
        ),
    ],
)
def test_panic_on_warn(first: str, words: str, cause: int) -> None:
    log = crash_log(*at(5, oops(first)), (5, PANIC + words))
    event = blamed(log)
    assert event is not None
    assert event.cause == ("memory-error", "warning", "bug")[cause]
    assert function_of(event) == "f"


def test_stack_that_is_corrupted() -> None:
    log = crash_log(
        (5, f"{PANIC}stack-protector: Kernel stack is corrupted in: f+0x1/0x2"),
        (5, "CPU: 0 PID: 7 Comm: a Not tainted 6.1.0 #1"),
        (5, "Call Trace:"),
        *[
            (5, f" {name}+0x1/0x2")
            for name in ("dump_stack_lvl", "panic", "__stack_chk_fail", "f", "caller")
        ],
    )
    event = blamed(log)
    assert event is not None
    assert (event.cause, function_of(event)) == ("stack-corruption", "f")


def test_interrupt_that_faults() -> None:
    """The frames of the task that was interrupted follow."""
    log = crash_log(
        *at(5, oops(NULL, function="handler")[:-2]),
        (5, " <IRQ>"),
        (5, " __handle_irq_event_percpu+0x1/0x2"),
        (5, " </IRQ>"),
        (5, " <TASK>"),
        (5, " asm_common_interrupt+0x1/0x2"),
        (5, " victim+0x1/0x2"),
        (6, f"{PANIC}Fatal exception in interrupt"),
    )
    assert function_of(blamed(log)) == "handler"


def test_no_event() -> None:
    assert blamed(crash_log()) is None
