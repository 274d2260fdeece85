# SPDX-License-Identifier: LGPL-2.1-or-later

"""Events of the kernel's log, for what the lab's guests cannot be made to do."""

import pytest
from msgspec.structs import replace

from msatools.program.description import LogRecord
from msatools.report.log import (
    MAX_EVENTS,
    PANIC,
    Cause,
    event_cause,
    faulting,
    fingerprint,
    panic_cause,
    parse_events,
)

ARM64 = """\
Unable to handle kernel NULL pointer dereference at virtual address 0000000000000040
Mem abort info:
  ESR = 0x0000000096000004
Internal error: Oops: 0000000096000004 [#1] SMP
Modules linked in: driver(OE)
CPU: 1 PID: 187 Comm: crash null Tainted: G           OE      6.1.0-56-arm64 #1 Debian
pstate: 60400005 (nZCv daif +PAN -UAO -TCO -DIT -SSBS BTYPE=--)
pc : driver_read+0x8/0x20 [driver]
lr : driver_write+0x30/0x60 [driver]
sp : ffff80000a4cbd60
Call trace:
 driver_read+0x8/0x20 [driver]
 driver_write+0x30/0x60 [driver]
 vfs_write+0xcc/0x2d0
 el0_svc+0x34/0xd4
Code: d503201f
---[ end trace 0000000000000000 ]---
Kernel panic - not syncing: Oops: Fatal exception
"""

JUMP = """\
kernel tried to execute NX-protected page - exploit attempt? (uid: 0)
BUG: unable to handle page fault for address: ffffffffc04cf0e8
#PF: supervisor instruction fetch in kernel mode
Oops: Oops: 0011 [#1] PREEMPT SMP NOPTI
CPU: 1 UID: 0 PID: 173 Comm: jumper Tainted: G           OE      6.12.0 #1  Debian
RIP: 0010:a_variable+0x0/0x8 [driver]
RSP: 0018:ff31c6bd401c7cf8 EFLAGS: 00000246
Call Trace:
 <TASK>
 ? driver_jump+0x11/0x20 [driver]
 ? driver_write+0x1c2/0x200 [driver]
 ? vfs_write+0xf8/0x450
 ? do_syscall_64+0x87/0x180
 ? handle_mm_fault+0xae/0x2d0
 </TASK>
---[ end trace 0000000000000000 ]---
Kernel panic - not syncing: Fatal exception
"""


def log(text: str, tid: int = 1, cpu: int | None = None) -> list[LogRecord]:
    return [
        LogRecord(number, 4, line, None if cpu is not None else tid, cpu)
        for number, line in enumerate(text.splitlines())
    ]


def test_oops_of_arm64() -> None:
    oops, panic = parse_events(log(ARM64))
    assert (oops.cause, panic.cause, panic.is_panic) == (
        "null-dereference",
        "panic",
        True,
    )
    trace = oops.backtrace
    assert trace is not None
    assert (trace.cpu, trace.pid, trace.comm) == (1, 187, "crash null")
    assert [frame.function for frame in trace.frames][:2] == [
        "driver_read",
        "driver_read",
    ]
    assert trace.frames[0].module == "driver"


@pytest.mark.parametrize(
    "target", ["a_variable+0x0/0x8 [driver]", "0xffffffffc04cf0e8"]
)
def test_jump_to_what_is_no_code(target: str) -> None:
    """The kernel unwinds nothing from there: who jumped is a guess, and at fault.

    What lies past the system call is of other calls.
    """
    text = JUMP.replace("a_variable+0x0/0x8 [driver]", target)
    oops, panic = parse_events(log(text))
    assert (oops.cause, panic.is_panic) == ("page-fault", True)
    assert oops.backtrace is not None
    found = faulting(oops.backtrace.frames, oops.cause)
    functions = [frame.function for frame in found]
    assert functions == ["driver_jump", "driver_write", "vfs_write"]
    assert found[0].text == "? driver_jump+0x11/0x20 [driver]"
    other = fingerprint(oops.cause, found[1:], None)
    assert other != fingerprint(oops.cause, found, None)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            "BUG: unable to handle page fault for address: ffffc90000000000",
            "page-fault",
        ),
        ("Unable to handle kernel paging request at virtual address 1", "page-fault"),
        ("general protection fault, probably for non-canonical", "protection-fault"),
        ("general protection fault: 0000 [#1] SMP", "protection-fault"),
        ("Oops: general protection fault, probably for non", "protection-fault"),
        ("Oops: divide error: 0000 [#1] SMP", "divide-error"),
        ("Oops: invalid opcode: 0000 [#1] SMP", "invalid-opcode"),
        ("kernel BUG at mm/slub.c:4385!", "bug"),
        ("Insufficient stack space to handle exception!", "stack-overflow"),
        ("BUG: KASAN: slab-use-after-free in f+0x1/0x2", "memory-error"),
        ("BUG: scheduling while atomic: swapper/0/0/0x00000002", "bug"),
        ("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [a b:12]", "soft-lockup"),
        ("watchdog: CPU3: Watchdog detected hard LOCKUP on cpu 3", "hard-lockup"),
        ("NMI watchdog: Watchdog detected hard LOCKUP on cpu 2", "hard-lockup"),
        ("rcu: INFO: rcu_sched detected stalls on CPUs/tasks:", "rcu-stall"),
        ("rcu: INFO: rcu_preempt self-detected stall on CPU", "rcu-stall"),
        ("INFO: task a:1:2 blocked for more than 120 seconds.", "hung-task"),
        ("INFO: task a:2 blocked in I/O wait for more than 9 seconds.", "hung-task"),
        ("BUG: workqueue lockup - pool cpus=1 node=0 flags=0x0", "workqueue-stall"),
        ("WARNING: CPU: 0 PID: 1 at mm/page_alloc.c:1 f+0x1/0x2", "warning"),
        ("WARNING: mm/page_alloc.c:1 at f+0x1/0x2, CPU#0: a/1", "warning"),
        ("a b invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL)", "out-of-memory"),
        ("systemd[1]: BUG: nothing of the kernel's", None),
        ("Command line: panic=1", None),
        ("BUG: arch topology borken", None),
        ("BUG: MAX_LOCKDEP_ENTRIES too low!", None),
    ],
)
def test_first_lines(line: str, cause: Cause | None) -> None:
    assert event_cause(line) == cause


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("Fatal machine check", "machine-check"),
        ("Timeout: Not all CPUs entered broadcast exception handler", "machine-check"),
        ("NMI: Not continuing", "nmi"),
        ("An NMI occurred. Depending on your system", "nmi"),
        ("Attempted to kill init! exitcode=0x0000000b", "init-killed"),
        ("VFS: Unable to mount root fs on unknown-block(0,0)", "no-root"),
        ("stack-protector: Kernel stack is corrupted in: f", "stack-corruption"),
        ("corrupted stack end detected inside scheduler", "stack-corruption"),
        ("System is deadlocked on memory", "out-of-memory"),
        ("Out of memory and no killable processes...", "out-of-memory"),
        ("kernel: panic_on_warn set ...", "warning"),
        ("hung_task: blocked tasks", "hung-task"),
        ("RCU Stall", "rcu-stall"),
        ("Hard LOCKUP", "hard-lockup"),
        ("softlockup: hung tasks", "soft-lockup"),
        ("something of a driver's own", "panic"),
    ],
)
def test_words_of_panics(words: str, cause: Cause) -> None:
    assert panic_cause(words) == cause
    (event,) = parse_events(log(f"{PANIC}{words}"))
    assert (event.cause, event.is_panic) == (cause, True)


def test_mixed_lines_of_two_cpus() -> None:
    """Each CPU's frames are its own, by the writer of each line."""
    first = log(
        "rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:\n"
        "rcu: \t1-...!: (0 ticks this GP) idle=1\n",
        cpu=0,
    )
    one = log(
        "NMI backtrace for cpu 1\n"
        "CPU: 1 PID: 9 Comm: stuck Not tainted 6.1.0 #1\n"
        "RIP: 0010:spin+0x1/0x2 [driver]\n"
        "Call Trace:\n"
        " <TASK>\n"
        " holder+0x3/0x4 [driver]\n",
        cpu=1,
    )
    two = log(
        "CPU: 0 PID: 0 Comm: swapper/0 Not tainted 6.1.0 #1\n"
        "Call Trace:\n"
        " ? old+0x1/0x2\n"
        " watch+0x1/0x2\n"
        " RIP: 0033:0x7f\n",
        cpu=0,
    )
    mixed = [line for pair in zip(one, two, strict=False) for line in pair]
    (event,) = parse_events([*first, *mixed, *one[len(two) :]])
    assert event.cpu == 1
    trace = event.backtrace
    assert trace is not None
    assert [frame.text for frame in trace.frames] == [
        "spin+0x1/0x2 [driver]",
        "holder+0x3/0x4 [driver]",
    ]
    (other,) = (each for each in event.backtraces if each.cpu == 0)
    assert [frame.function for frame in other.frames] == ["watch"]


def test_events_are_bounded() -> None:
    found = parse_events(log("WARNING: at f+0x1/0x2\n" * (MAX_EVENTS + 50)))
    assert len(found) == MAX_EVENTS
    assert found[-1].time_ns == MAX_EVENTS + 49


# --- lines that programs can make


FORGED = """\
BUG: kernel NULL pointer dereference, address: 0000000000000000
Kernel panic - not syncing: Fatal exception
a invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0
"""


@pytest.mark.parametrize("facility", [1, 3, 255])
def test_what_programs_write_is_no_event(facility: int) -> None:
    lines = [replace(each, facility=facility) for each in log(FORGED)]
    assert parse_events(lines) == []


@pytest.mark.parametrize(
    "line",
    [
        "kernel BUG at /[7]: segfault at 0 ip 0 sp 0 error 4 in x[400000+1000]",
        "BUG: x[1234567]: segfault at 0 ip 0 sp 0 error 4 likely on CPU 1",
        "BUG: \nx[7]: segfault at 0 ip 0",
        "BUG: x[7]: unhandled exception: DABT (lower EL), ESR 0x92000006",
        "x\nkernel BUG at [7]: segfault at 0",
    ],
)
def test_names_of_programs_are_no_event(line: str) -> None:
    """Some lines begin with a name that the task chose."""
    (record,) = log("x")
    assert parse_events([replace(record, text=line)]) == []


def test_name_with_line_feeds() -> None:
    first, second = log("a\nb")
    stuck = "watchdog: BUG: soft lockup - CPU#1 stuck for 22s! [a\n]b:12]"
    cpu = "CPU: 1 PID: 12 Comm: a\n]b Not tainted 6.1.0 #1"
    (event,) = parse_events([replace(first, text=stuck), replace(second, text=cpu)])
    assert (event.cpu, event.pid, event.comm) == (1, 12, "a\n]b")
    (trace,) = event.backtraces
    assert (trace.cpu, trace.pid, trace.comm) == (1, 12, "a\n]b")


def test_absurd_numbers() -> None:
    many = "9" * 5000
    text = (
        f"INFO: task a:{many} blocked for more than 120 seconds.\n"
        f"CPU: {many} PID: {many} Comm: a Not tainted 6.1.0 #1\n"
        f"rcu: \t{many}-...!: (0 ticks this GP)"
    )
    (event,) = parse_events(log(text))
    assert (event.cpu, event.pid, event.backtraces) == (None, None, [])
