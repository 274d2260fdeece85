# SPDX-License-Identifier: LGPL-2.1-or-later

"""Parse the kernel's log: oopses, warnings, stalls, panics, and their causes."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from msatools.errors import UNREADABLE
from msatools.kernel.reader import PAGE, Reader
from msatools.kernel.report import Loss, LossLog
from msatools.program.description import LogRecord, log_records
from msatools.tasks.waits import is_thunk

# --- The kernel's log, with a count of what cannot be read.


_LOST = "messages of the kernel's log cannot be read"


def read_log(reader: Reader, losses: LossLog) -> list[LogRecord]:
    """Return the messages in the kernel's log, the oldest first.

    Messages that cannot be read are counted, and left out.

    :raises MissingError: if the kernel has no such log, as before v5.10
    """

    def read(address: int, size: int) -> tuple[bytes | bytearray, list[range]]:
        data, gaps = reader.read_around_gaps(address, size, PAGE)
        return data, [range(gap.offset, gap.offset + gap.size) for gap in gaps]

    def lose(count: int) -> None:
        losses.lose(Loss.LOG, _LOST, count=count)

    try:
        return list(log_records(reader.prog, read, lose))
    except UNREADABLE as error:
        losses.lose(Loss.LOG, f"the kernel's log cannot be read: {error}")
        return []


# --- Causes of crashes, by the kernel's messages.
#
# Two tables: one of the lines that begin a report of the kernel (an oops, a stall), one
# of the words of panic(). Both are in the order in which they are tried.


Cause = Literal[
    "null-dereference",
    "page-fault",
    "protection-fault",
    "stack-overflow",
    "stack-corruption",
    "bug",
    "divide-error",
    "invalid-opcode",
    "oops",
    "memory-error",
    "warning",
    "soft-lockup",
    "hard-lockup",
    "rcu-stall",
    "hung-task",
    "workqueue-stall",
    "out-of-memory",
    "init-killed",
    "no-root",
    "sysrq",
    "nmi",
    "machine-check",
    "panic",
]
"""``memory-error``: reported by KASAN, KFENCE and the like. ``oops`` and ``panic``:
of no kind in the tables below."""

OOPSES: frozenset[Cause] = frozenset(
    {
        "null-dereference",
        "page-fault",
        "protection-fault",
        "stack-overflow",
        "stack-corruption",
        "bug",
        "divide-error",
        "invalid-opcode",
        "oops",
        "memory-error",
    }
)
"""Faults of the kernel's own code, most of which kill the current task or panic."""

WATCHDOGS: frozenset[Cause] = frozenset(
    {"soft-lockup", "hard-lockup", "rcu-stall", "hung-task", "workqueue-stall"}
)

_EVENTS: tuple[tuple[str, Cause], ...] = (
    # arch/x86/mm/fault.c and arch/arm64/mm/fault.c
    (r"BUG: (unable to handle )?[Kk]ernel NULL pointer deref", "null-dereference"),
    (r"Unable to handle kernel NULL pointer dereference", "null-dereference"),
    (r"BUG: unable to handle page fault for address", "page-fault"),
    # before f28b11a2abd9 ("x86/fault: Reword initial BUG message for unhandled page
    # faults") (in v5.1), and powerpc
    (r"BUG: [Uu]nable to handle kernel ", "page-fault"),
    (r"Unable to handle kernel (paging request|.* at virtual address)", "page-fault"),
    (r"kernel tried to execute NX-protected page", "page-fault"),
    # arch/x86/kernel/traps.c and dumpstack.c
    (r"BUG: \S+ stack guard page was hit", "stack-overflow"),
    (r"BUG: stack guard page was hit", "stack-overflow"),
    (r"(kernel|Insufficient) stack (overflow|space)", "stack-overflow"),
    (r"(Oops: )?general protection fault", "protection-fault"),
    # lib/bug.c
    (r"kernel BUG at ", "bug"),
    (r"(Oops: )?divide error: ", "divide-error"),
    (r"(traps: )?PANIC: double fault", "oops"),
    (r"BUG: (KASAN|KFENCE|KMSAN|KCSAN): ", "memory-error"),
    # lib/ubsan.c
    (r"UBSAN: ", "warning"),
    # kernel/watchdog.c, kernel/watchdog_perf.c
    (r"(NMI )?(watchdog: )?BUG: soft lockup", "soft-lockup"),
    (r"(watchdog: )?.*Watchdog detected hard LOCKUP", "hard-lockup"),
    # kernel/rcu/tree_stall.h
    (r"(rcu: )?INFO: rcu\w* .*stall", "rcu-stall"),
    # kernel/hung_task.c
    (r"INFO: task .* blocked (in I/O wait )?for more than \d+ seconds", "hung-task"),
    # kernel/workqueue.c
    (r"BUG: workqueue lockup", "workqueue-stall"),
    (r"WARNING: (CPU: \d+ PID: \d+ |\S+:\d+ )?at ", "warning"),
    # mm/page_alloc.c, warn_alloc()
    (r".{0,64}: page allocation failure: order:\d", "warning"),
    (r"\S.* invoked oom-killer: ", "out-of-memory"),
    (r"BUG: (?!arch topology borken|MAX_\w+ too low|recent printk recursion)", "bug"),
    # Lines of die(); for other causes they come after one of the lines above.
    (r"(Oops: )?invalid opcode: ", "invalid-opcode"),
    (r"Internal error: |Oops\b|double fault: ", "oops"),
)

_PANICS: tuple[tuple[str, Cause], ...] = (
    (r"sysrq triggered crash", "sysrq"),
    (r"SysRq : Trigger a crash", "sysrq"),
    (r"Out of memory|System is deadlocked on memory", "out-of-memory"),
    (r"Attempted to kill init", "init-killed"),
    (r"softlockup: hung tasks", "soft-lockup"),
    (r"Hard LOCKUP", "hard-lockup"),
    (r"RCU Stall", "rcu-stall"),
    (r"hung_task: blocked tasks", "hung-task"),
    (r"workqueue: ", "workqueue-stall"),
    (r"K[ACM]SAN|KFENCE|kasan|kfence|.*memory corruption", "memory-error"),
    (r".*panic_on_warn set", "warning"),
    (r"stack-protector: |corrupted stack end detected", "stack-corruption"),
    (r"kernel stack overflow", "stack-overflow"),
    (r".*[Mm]achine check|.*MCE", "machine-check"),
    (r"Timeout: Not all CPUs entered broadcast exception", "machine-check"),
    (r".*\bNMI\b", "nmi"),
    (r"VFS: Unable to mount root|No working init found", "no-root"),
)

EXCEPTION = re.compile(
    r"Fatal exception|Oops|BUG|Machine halted|Aiee, killing interrupt handler|"
    r"Attempted to kill the idle task"
)
"""Start of panic()'s message after an oops, whose own lines come before."""

_CAUSE_OF_PROGRAM = re.compile(r".{1,15}\[\d+\]: (segfault at|unhandled) ", re.DOTALL)
"""Faults of programs, whose lines begin with a name that the program chose:
show_signal_msg() in arch/x86/mm/fault.c, arm64_show_signal()."""

_COMPILED_EVENTS = [(re.compile(words, re.DOTALL), cause) for words, cause in _EVENTS]
_COMPILED_PANICS = [(re.compile(words), cause) for words, cause in _PANICS]


def event_cause(line: str) -> Cause | None:
    """Return the cause of the report that a line begins; ``None`` if it begins none."""
    if _CAUSE_OF_PROGRAM.match(line):
        return None
    for words, cause in _COMPILED_EVENTS:
        if words.match(line):
            return cause
    return None


def panic_cause(words: str) -> Cause:
    """Return the cause for the message of panic(); ``panic`` if no table has it."""
    for pattern, cause in _COMPILED_PANICS:
        if pattern.match(words):
            return cause
    return "panic"


# --- Frames of a stack in the form of the kernel's log, and fingerprints of crashes.
#
# A fingerprint is the same for one fault on several builds of a kernel. It is made from
# the cause and from functions alone: without addresses, offsets and the compiler's
# suffixes, and without the functions that every crash of its kind goes through.


CALLERS = 3
"""Number of callers of the faulting function that a fingerprint is made from."""

DIGITS = 16
"""Length of a fingerprint, of the 64 digits of SHA-256."""

_FRAME = re.compile(
    r"(?P<function>[A-Za-z_.$][\w.$]*)\+(?P<offset>0x[0-9a-f]+)"
    r"(?:/0x[0-9a-f]+)?(?: \[(?P<module>[\w-]+)(?: [0-9a-f]+)?\])?"
)

_SUFFIXES = re.compile(
    r"(\.(isra|constprop|part|cold|llvm|lto_priv)(\.\d+)*|_noprof)+$"
)
"""Suffixes of copies that a compiler makes, and of allocations that are profiled
(b951aaff5035 ("mm: enable page allocation tagging") (in v6.10))."""

_MACHINERY = re.compile(
    r"v?panic|_panic|nmi_panic|panic_print\w*|dump_stack\w*|show_stack|show_regs|"
    r"__?die\w*|die|oops_\w+|die_addr|crash_kexec|__crash_kexec|machine_kexec|"
    r"page_fault_oops|kernelmode_fixup_or_oops|no_context|__?bad_area\w*|"
    r"do_(user|kern)_addr_fault|do_page_fault|__do_page_fault|do_translation_fault|"
    r"do_mem_abort|do_sp_pc_abort|do_trap\w*|do_error_trap|do_int3|"
    r"exc_\w+|asm_exc_\w+|handle_bug|handle_invalid_op|handle_stack_overflow|"
    r"report_bug|bug_handler|call_break_hook|brk_handler|do_debug_exception|"
    r"do_el1_\w+|el1h?_\w+|el1t_\w+|arm64_notify_die|arm64_force_sig\w*|"
    r"__?warn\w*|warn_slowpath\w*|refcount_warn_saturate|"
    r"__list_(add|del_entry)_valid\w*|usercopy_abort|__check_object_size|"
    r"fortify_panic|__fortify_\w+|__stack_chk_fail|kasan_\w+|__asan_\w+|"
    r"print_report|print_address_description|"
    r"check_memory_region|__schedule_bug|_*might_(sleep|resched)\w*|bad_page|warn_alloc|"
    r"watchdog_timer_fn|watchdog_overflow_callback|watchdog_hardlockup_\w+|"
    r"check_hung_\w+|watchdog|rcu_sched_clock_irq|check_cpu_stall|"
    r"print_(cpu|other_cpu)_stall\w*|panic_on_rcu_stall|"
    r"__schedule|schedule\w*|preempt_schedule\w*|io_schedule\w*|__switch_to\w*"
)
"""Functions through which the kernel reports a fault, or waits."""

_PANIC = ("panic", "vpanic", "nmi_panic", "crash_kexec", "__crash_kexec")
"""Functions that end the kernel: whatever they call does not matter."""

_ENTRIES = re.compile(
    r"entry_\w+|asm_\w+|sysvec_\w+|__sysvec_\w+|do_syscall_\w+|do_int80\w*|"
    r"do_fast_syscall\w*|x64_sys_call|__(x64|arm64|ia32|se|do)_sys_\w+|"
    r"ret_from_fork\w*|kthread|worker_thread|el0\w*|do_el0_\w+|invoke_syscall\w*|"
    r"secondary_startup\w*|start_secondary|start_kernel|cpu_startup_entry"
)
"""Functions at the outer end of stacks: entries of the kernel and of threads."""

_WAITING = re.compile(
    r"(native_|__pv_)?queued_\w+_lock_slowpath|_raw_\w+_lock\w*|"
    r"(__)?(ww_)?mutex_lock\w*|rwsem_\w+|(__)?down(_\w+)?|__?rt_mutex\w*|"
    r"percpu_(rwsem|down)\w*|__percpu_down\w*|wait_for_\w+|__wait_for_\w+|"
    r"(__)?wait_on_\w+|out_of_line_wait_\w+|bit_wait\w*|folio_wait_bit\w*|"
    r"do_wait_for_common|rtlock_\w+|rt_(spin|read|write)_lock\w*"
)
"""Functions that wait for a lock or an event: their caller is stuck."""

_INTERRUPTED = re.compile(r"asm_(sysvec|exc_nmi|common_interrupt)\w*|el1h?_\w*irq\w*")
"""Entry points of interrupts, in which watchdogs run; the interrupted code is next."""

_ALLOCATION = re.compile(
    r"dump_header|oom_kill_process|out_of_memory|mem_cgroup_out_of_memory|"
    r"mem_cgroup_oom|__alloc_pages\w*|__alloc_frozen_pages\w*|alloc_\w*pages?\w*|"
    r"\w*folio_alloc\w*|\w*alloc_folio\w*|__get_free_pages|get_zeroed_page|"
    r"allocate_slab|new_slab|_*slab_alloc\w*|_*kmem_cache_alloc\w*|"
    r"_*(do_)?kv?[mzc]alloc\w*|__?vmalloc\w*|v[mz]alloc\w*|"
    r"try_charge\w*|charge_memcg|__?mem_cgroup_charge\w*|mem_cgroup_\w*charge\w*|"
    r"obj_cgroup_charge\w*|pagefault_out_of_memory"
)
"""Functions that allocate memory, or charge a control group for it."""


_SLEEP_CHECK = re.compile(r"__schedule_bug|_*might_(sleep|resched)")
"""Functions that report sleep in atomic context (kernel/sched/core.c)."""

_SLEEPING = re.compile(
    rf"{_WAITING.pattern}|(m|fs)sleep\w*|usleep_\w+|schedule\w*|io_schedule\w*|"
    rf"\w*cond_resched\w*|{_ALLOCATION.pattern}"
)
"""Functions that may sleep: in atomic context their caller is at fault."""


class Frame(Struct, frozen=True):
    """A frame of a stack."""

    function: str
    text: str
    """As in the kernel's log: ``vfs_write+0xf8/0x450``, with the module in brackets."""

    module: str | None = None


def parse_frame(text: str) -> Frame | None:
    """Return the frame that a text of the log names; ``None`` if it names none."""
    found = _FRAME.match(text)
    if found is None:
        return None
    return Frame(found["function"], found[0], found["module"])


def plain_name(function: str) -> str:
    """Return a function's name without suffixes that depend on the build."""
    return _SUFFIXES.sub("", function)


def is_machinery(function: str) -> bool:
    """Return whether a function reports faults, and is not at fault itself.

    Nor is a thunk at fault, but the caller that jumped through it.
    """
    return is_thunk(function) or bool(_MACHINERY.fullmatch(plain_name(function)))


def is_entry(frame: Frame) -> bool:
    """Return whether a frame is at the end of all stacks: a system call or the like."""
    return bool(_ENTRIES.fullmatch(plain_name(frame.function)))


def before_panic(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames of the functions that panic() called, the innermost first."""
    return list(takewhile(lambda frame: frame.function not in _PANIC, frames))


def below_panic(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames from the caller of the first panic() on; without one, all."""
    panics = [i for i, frame in enumerate(frames, 1) if frame.function in _PANIC]
    return list(frames[panics[-1] :] if panics else frames)


def faulting(frames: Sequence[Frame], cause: Cause) -> list[Frame]:
    """Return the frames from the faulting one on, the innermost first.

    For a stall they begin with the function that waits or spins, not with the watchdog
    or the lock; for a lack of memory, with the one that asked for it; for sleep in
    atomic context, with the caller of the function that sleeps.
    """
    kept = below_panic(frames)
    if cause in WATCHDOGS:
        entries = [_INTERRUPTED.fullmatch(frame.function) for frame in kept]
        if any(entries):
            del kept[: next(i for i, entry in enumerate(entries, 1) if entry)]
    reporters = {plain_name(frame.function) for frame in kept}
    kept = [frame for frame in kept if not is_machinery(frame.function)]
    over = {"out-of-memory": _ALLOCATION, **dict.fromkeys(WATCHDOGS, _WAITING)}
    pattern = over.get(cause)
    if cause == "bug" and any(map(_SLEEP_CHECK.fullmatch, reporters)):
        pattern = _SLEEPING
    elif cause == "warning" and "warn_alloc" in reporters:
        pattern = _ALLOCATION
    if pattern:
        names = (plain_name(frame.function) for frame in kept)
        starts = (i for i, name in enumerate(names) if not pattern.fullmatch(name))
        # If all frames match, keep them: better than an empty stack.
        del kept[: next(starts, 0)]
    return kept


def fingerprint(cause: Cause, frames: Sequence[Frame], constraint: str | None) -> str:
    """
    Return the fingerprint of a crash.

    It is the start of the SHA-256 of these lines: the cause, the faulting function,
    and up to :data:`CALLERS` of its callers, each function once if it calls itself.
    A lack of memory shows the stack of any task that happened to ask for it: so the
    constraint replaces the functions.

    :param frames: The frames of :func:`faulting`.
    :param constraint: What ran out of memory, such as ``cgroup``; only used then.
    """
    if cause == "out-of-memory":
        lines = [cause, constraint or "none"]
    else:
        lines = [cause, *_functions(frames)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:DIGITS]


def _functions(frames: Iterable[Frame]) -> list[str]:
    names: list[str] = []
    for name in _without_ends(plain_name(frame.function) for frame in frames):
        if name not in names[-1:]:
            names.append(name)
        if len(names) > CALLERS:
            break
    return names


def _without_ends(names: Iterable[str]) -> Iterator[str]:
    return (name for name in names if not _ENTRIES.fullmatch(name))


# --- What the kernel reported in its log: oopses, warnings, stalls and panics.
#
# Lines of several CPUs may be mixed: each line says which thread or CPU wrote it.


PANIC = "Kernel panic - not syncing: "

MAX_EVENTS = 256
"""Events kept, the latest: a machine may warn for days."""

_CPU = re.compile(
    r"CPU: (?P<cpu>\d{1,10}) (?:UID: \d+ )?PID: (?P<pid>\d{1,10}) Comm: (?P<comm>.*?) "
    # Red Hat's kernels have dashes for taints of their own.
    r"(?:Kdump: loaded )?"
    r"(?:Not tainted|Tainted: (?P<taints>[A-Z-]+(?: +[A-Z-]+)*)) +\d",
    re.DOTALL,
)
_TASK = re.compile(
    r"task:(?P<comm>.{0,64}?)\s+state:\S+\s.*?\bpid:\s*(?P<pid>\d{1,10})", re.DOTALL
)
_HUNG = re.compile(r"INFO: task (?P<comm>.*):(?P<pid>\d{1,10}) blocked ", re.DOTALL)
_STUCK = re.compile(
    r"BUG: soft lockup - CPU#(?P<cpu>\d{1,10}) [^\[]{0,64}"
    r"\[(?P<comm>.{0,64}):(?P<pid>\d{1,10})\]",
    re.DOTALL,
)
_HARD = re.compile(
    r"(?:CPU(?P<cpu>\d{1,10}): )?Watchdog detected hard LOCKUP"
    r"(?: on cpu (?P<on>\d{1,10}))?"
)
_STALLED = re.compile(r"(?:rcu:)?\s+(?P<cpu>\d{1,10})-\S+ \(")
# Of Xen's guests the kernel's code segment is another one; "PC is at" is of arm.
_KERNEL_RIP = re.compile(r"(?:RIP: (?:0010|e030):|e?pc : |PC is at )(?P<frame>.*)")
_ADDRESSES = re.compile(r"(?:\[<[0-9a-f]{8,16}>\]\s*)+")
"""Addresses before each function: on x86 until bb5e5ce545f2 ("x86/dumpstack: Remove
kernel text addresses from stack dump") (in v4.10); other architectures have them."""

_CALLED = re.compile(
    r"(?P<function>[A-Za-z_][\w.]*)"
    r"(?: \[\w+\])?(?: from \w| \([\w./-]+:\d+[^)]*\))"
)
"""A frame of arm, with function and caller; or one with file and line of the source
(scripts/decode_stacktrace.sh)."""
_USER_RIP = re.compile(r"RIP: 0033:")
_TRACE = re.compile(r"Call [Tt]race:")
_JUMP = re.compile(
    r"#PF: supervisor instruction fetch|"
    r"\s*EC = 0x21: IABT \(current EL\)|Unable to handle kernel execut"
)
"""Lines of a failed instruction fetch: the kernel jumped to an address without code."""

_DIE = re.compile(r"(?:Oops|error|fault|opcode|segment).*\[#\d{1,9}\]")
"""The line of die(), with the number of its calls (``[#1]``)."""

_EXECUTED = ("kernel tried to execute ", "unable to execute userspace code ")
_GUESS = "? "


class Backtrace(Struct):
    """The registers and the stack of one CPU or task."""

    cpu: int | None = None
    pid: int | None = None
    comm: str | None = None
    taints: str | None = None
    at: Frame | None = None
    """The frame of the instruction pointer, if it was in the kernel."""

    calls: list[Frame] = field(default_factory=list)
    """The frames that the kernel is sure of, the innermost first."""

    guesses: list[Frame] = field(default_factory=list)
    """The frames that it marks with a question mark: return addresses that it found on
    the stack, which may be left over from calls that have returned."""

    is_jump: bool = False
    """Whether it jumped to an address without code: then the caller is at fault."""

    @property
    def frames(self) -> list[Frame]:
        """All frames, the innermost first.

        The kernel cannot unwind from an address without code: then they are guesses, up
        to the entry of the system call or the like.
        """
        at = [self.at] if self.at and not self.is_jump else []
        if self.calls or (at and not self.is_jump):
            return [*at, *self.calls]
        return list(takewhile(lambda frame: not is_entry(frame), self.guesses))


class Event(Struct):
    """A report of the kernel on one fault."""

    cause: Cause
    message: str
    time_ns: int
    is_panic: bool = False
    is_die: bool = False
    """Whether die() reported it, which ends the task or the kernel."""

    is_over: bool = False
    """Whether the kernel said that it had reported all of it (kernel/panic.c,
    oops_exit()), as it does unless a capture kernel took over."""

    line: int = 0
    """Line of the text at which the report begins, from 1; 0 in a dump."""

    cpu: int | None = None
    """The CPU at fault, if the message names it."""

    pid: int | None = None
    comm: str | None = None
    backtraces: list[Backtrace] = field(default_factory=list)
    is_jump: bool = False
    """Whether the fault was a jump to an address without code."""

    @property
    def backtrace(self) -> Backtrace | None:
        """The backtrace of the CPU or task at fault, if there is one."""
        for each in self.backtraces:
            if self.cpu is not None and each.cpu == self.cpu and each.frames:
                return each
        return next((each for each in self.backtraces if each.frames), None)


class _EventParser:
    """Collects the events of a log, line by line."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._open: dict[tuple[int | None, int | None], Backtrace] = {}
        """The unfinished backtrace of each writer, by its thread ID and CPU."""

        self._in_trace: set[tuple[int | None, int | None]] = set()
        self._jumps: set[tuple[int | None, int | None]] = set()
        """Writers whose next event is a jump to an address without code."""

    def add(self, record: LogRecord, line: str) -> None:
        writer = record.tid, record.cpu
        if line.startswith(_EXECUTED):
            # The fault itself is reported next.
            self._jumps.add(writer)
            return
        if line.startswith(PANIC):
            words = line.removeprefix(PANIC)
            event = Event(
                panic_cause(words),
                line,
                record.time_ns,
                is_panic=True,
                line=record.line,
            )
            self._begin(event, writer)
        elif (cause := event_cause(line)) and not self._continues(cause, record):
            self._begin(_event(cause, line, record), writer)
        elif self.events:
            self._detail(self.events[-1], writer, line)
        if "[#" in line and self.events and _DIE.search(line):
            self.events[-1].is_die = True

    def _continues(self, cause: Cause, record: LogRecord) -> bool:
        """Return whether a line of die() belongs to the last event."""
        if cause not in ("oops", "invalid-opcode") or not self.events:
            return False
        last = self.events[-1]
        # A second oops begins with lines of its own.
        return not last.is_panic and not any(b.frames for b in last.backtraces)

    def _begin(self, event: Event, writer: tuple[int | None, int | None]) -> None:
        event.is_jump = writer in self._jumps
        self._jumps.discard(writer)
        self.events.append(event)
        del self.events[:-MAX_EVENTS]
        self._open.pop(writer, None)
        self._in_trace.discard(writer)

    def _detail(
        self, event: Event, writer: tuple[int | None, int | None], line: str
    ) -> None:
        if line.startswith("---[ end trace"):
            event.is_over = True
        if found := _CPU.match(line):
            backtrace = Backtrace(
                cpu=int(found["cpu"]),
                pid=int(found["pid"]),
                comm=found["comm"],
                taints=found["taints"],
            )
            self._new(event, writer, backtrace)
        elif found := _TASK.match(line):
            backtrace = Backtrace(pid=int(found["pid"]), comm=found["comm"])
            self._new(event, writer, backtrace)
        elif _JUMP.match(line):
            event.is_jump = True
        elif event.cause == "rcu-stall" and (found := _STALLED.match(line)):
            event.cpu = int(found["cpu"]) if event.cpu is None else event.cpu
        elif _TRACE.match(line):
            if writer not in self._open:
                self._new(event, writer, Backtrace())
            self._in_trace.add(writer)
        elif writer in self._open:
            self._frame(writer, line)

    def _new(
        self, event: Event, writer: tuple[int | None, int | None], trace: Backtrace
    ) -> None:
        trace.is_jump = event.is_jump and not event.backtraces
        event.backtraces.append(trace)
        self._open[writer] = trace
        self._in_trace.discard(writer)

    def _frame(self, writer: tuple[int | None, int | None], line: str) -> None:
        trace, in_trace = self._open[writer], writer in self._in_trace
        if found := _KERNEL_RIP.match(line):
            frame = parse_frame(_ADDRESSES.sub("", found["frame"].strip()))
            if frame is None:
                return
            if in_trace:
                trace.calls.append(frame)
            elif trace.at is None:
                trace.at = frame
        elif in_trace:
            if _USER_RIP.match(line) or line.startswith(("Modules linked in", "---[")):
                self._in_trace.discard(writer)
                return
            text = line.strip()
            if text.startswith("[<"):
                text = _ADDRESSES.sub("", text, count=1)
            if frame := parse_frame(text):
                trace.calls.append(frame)
            elif frame := parse_frame(text.removeprefix(_GUESS)):
                trace.guesses.append(replace(frame, text=f"{_GUESS}{frame.text}"))
            elif called := _CALLED.match(text):
                trace.calls.append(Frame(called["function"], text))


def _event(cause: Cause, line: str, record: LogRecord) -> Event:
    event = Event(cause, line, record.time_ns, line=record.line)
    if found := _HUNG.search(line) or _STUCK.search(line):
        event.pid, event.comm = int(found["pid"]), found["comm"]
    if found := _STUCK.search(line):
        event.cpu = int(found["cpu"])
    elif found := _HARD.search(line):
        number = found["cpu"] or found["on"]
        event.cpu = None if number is None else int(number)
    return event


def parse_events(log: Iterable[LogRecord]) -> list[Event]:
    """Return the events of a log, the oldest first; :data:`MAX_EVENTS` at most."""
    parser = _EventParser()
    for record in log:
        # The kernel logs each line of a report by itself: a line feed in one comes from
        # a task's name.
        if record.is_kernel:
            parser.add(record, record.text)
    return parser.events


# --- The last lines of the kernel's log that matter. Pure.


LINES = 20

_WARNING = 4
"""KERN_WARNING: less severe messages are left out."""

_NOISE = re.compile(
    r"(R[A-Z0-9]{1,2}|E[A-Z]{2}|CR\d|DR\d|[CDEFGS]S|PKRU|EFLAGS|x\d+|pstate|sp|lr)"
    r" ?: ?|"
    r"(RSP|RIP): 00|Code: |</?[A-Z #\w]+>$|Call [Tt]race:|Modules linked in:|"
    r"Hardware name: |Kernel Offset:|Tainted: \[|\[ *\d+\] +\d+ +\d+ |#PF: |PGD |"
    r"---\[ |-+\[ cut here|CPU: \d+ |NMI backtrace for|Sending NMI|"
    r"Node \d+ |lowmem_reserve|\d+ (total )?(pages|pagecache) |(Free|Total) swap|"
    r"active_anon:|"
    r"[a-z_]+:\d+ [a-z_]+:\d+|kernel_misc_reclaimable|Tasks state |Mem-Info:|"
    r"[a-z_]+ \d+$|>?[A-Z] +\S+ +\d+ +[\d.]+ +\d+ +\d+ |"
    # Tables of the scheduler (kernel/sched/debug.c), of workqueues and of timers, which
    # sysrq and some watchdogs print.
    r">?[A-Z] .{1,16} +\d+ +-?\d+\.\d+ |S +task +PID|runnable tasks:|-{20}|"
    r"(cfs|rt|dl)_rq\[|cpu#\d+|\.[\w>.-]+ +: |Sched Debug Version|sysctl_sched|"
    r"ktime +:|sched_clock_stable\(\) +: |"
    # Details of a stall of RCU, by CPU (kernel/rcu/tree_stall.h): the verdict has them.
    r"rcu: +(\d+-|\((detected by|t=))|rcu: .*[Ss]tack dump( where .*)?:$|"
    r"sched_clk +:|cpu_clk +:|jiffies +:|task:.{1,16} state:|"
    r"Showing (busy|all)|workqueue \S+: flags|pwq \d+: |pool \d+: |"
    r"(in-flight|pending|inactive|delayed|idle): |"
    # Lines that healthy kernels log, too, at each boot or mount.
    r"device-mapper: core: CONFIG_IMA|\S+: loading out-of-tree module|"
    r".*supports timestamps until"
)
"""Lines to leave out: registers and the like, which the report has elsewhere, and
tables that would fill the page."""

_LINE_OF_PROGRAM = "(by a program) "
"""Marks what was written to /dev/kmsg, which may claim anything."""

_BOOT_NS = 30_000_000_000
"""Time from boot in which messages are left out: they are the same at each boot."""


def last_lines(log: Sequence[LogRecord]) -> tuple[str, ...]:
    """Return the last :data:`LINES` lines that matter, as dmesg prints them.

    Only the last of repeated lines is kept, with the number of times.
    """
    last_ns = log[-1].time_ns if log else 0
    times: dict[str, int] = {}
    lines: list[tuple[str, str]] = []
    for record in reversed(log):
        if record.level > _WARNING:
            continue
        if record.time_ns < min(_BOOT_NS, last_ns // 2) or len(lines) >= LINES:
            break
        for line in reversed(_lines(record)):
            if _is_noise(line):
                continue
            text = line.partition("] ")[2]
            if text not in times:
                lines.append((line, text))
            times[text] = times.get(text, 0) + 1
    return tuple(
        line if times[text] == 1 else f"{line} ({times[text]} times)"
        for line, text in reversed(lines[:LINES])
    )


def all_lines(log: Iterable[LogRecord]) -> Iterator[str]:
    """Yield all lines of a log, as dmesg prints them."""
    for record in log:
        yield from _lines(record)


def _lines(record: LogRecord) -> list[str]:
    stamp = f"[{record.when or '-'}]"
    if record.when is None:
        stamp = _stamp(record.time_ns)
    writer = "" if record.is_kernel else _LINE_OF_PROGRAM
    lines = record.text.expandtabs().split("\n")
    return [f"{stamp} {writer}{line}" for line in lines]


def _is_noise(line: str) -> bool:
    text = line.partition("] ")[2].strip()
    frame = parse_frame(text.removeprefix("? "))
    return not text or frame is not None or bool(_NOISE.match(text))


def _stamp(time_ns: int) -> str:
    seconds, rest = divmod(time_ns // 1000, 1_000_000)
    return f"[{seconds:5}.{rest:06}]"
