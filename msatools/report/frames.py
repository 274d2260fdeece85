# SPDX-License-Identifier: LGPL-2.1-or-later

"""Frames of a stack in the form of the kernel's log, and fingerprints of crashes.

A fingerprint is the same for one fault on several builds of a kernel. It is made from
the cause and from functions alone: without addresses, offsets and the compiler's
suffixes, and without the functions that every crash of its kind goes through.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from msgspec import Struct

from msatools.report.causes import WATCHDOGS, Cause

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
    r"check_memory_region|"
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
"""Functions at the ends of all stacks."""

_WAITING = re.compile(
    r"(native_|__pv_)?queued_\w+_lock_slowpath|_raw_\w+_lock\w*|"
    r"(__)?(ww_)?mutex_lock\w*|rwsem_\w+|(__)?down(_\w+)?|__?rt_mutex\w*|"
    r"percpu_(rwsem|down)\w*|__percpu_down\w*|wait_for_\w+|__wait_for_\w+|"
    r"(__)?wait_on_\w+|out_of_line_wait_\w+|bit_wait\w*|folio_wait_bit\w*|"
    r"do_wait_for_common|rtlock_\w+|rt_(spin|read|write)_lock\w*"
)
"""Functions that wait for a lock or an event: whoever called them is stuck."""

_INTERRUPTED = re.compile(r"asm_(sysvec|exc_nmi|common_interrupt)\w*|el1h?_\w*irq\w*")
"""Entry points of interrupts, in which watchdogs run: what they met comes next."""

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
    """Return whether a function reports faults, and is not at fault itself."""
    return bool(_MACHINERY.fullmatch(plain_name(function)))


def is_entry(frame: Frame) -> bool:
    """Return whether a frame is at the end of all stacks: a system call or the like."""
    return bool(_ENTRIES.fullmatch(plain_name(frame.function)))


def before_panic(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames of what panic() called, the innermost first."""
    return list(takewhile(lambda frame: frame.function not in _PANIC, frames))


def below_panic(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames from who called the first panic() on; without one, all."""
    panics = [i for i, frame in enumerate(frames, 1) if frame.function in _PANIC]
    return list(frames[panics[-1] :] if panics else frames)


def faulting(frames: Sequence[Frame], cause: Cause) -> list[Frame]:
    """Return the frames from the faulting one on, the innermost first.

    Of a stall these begin with who waits or spins, and not with the watchdog or the
    lock; for want of memory, with who asked for it.
    """
    kept = below_panic(frames)
    if cause in WATCHDOGS:
        entries = [_INTERRUPTED.fullmatch(frame.function) for frame in kept]
        if any(entries):
            del kept[: next(i for i, entry in enumerate(entries, 1) if entry)]
    kept = [frame for frame in kept if not is_machinery(frame.function)]
    over = {"out-of-memory": _ALLOCATION, **dict.fromkeys(WATCHDOGS, _WAITING)}
    if pattern := over.get(cause):
        names = (plain_name(frame.function) for frame in kept)
        starts = (i for i, name in enumerate(names) if not pattern.fullmatch(name))
        # A stack of nothing else is better than none.
        del kept[: next(starts, 0)]
    return kept


def fingerprint(cause: Cause, frames: Sequence[Frame], constraint: str | None) -> str:
    """
    Return the fingerprint of a crash.

    It is the start of the SHA-256 of these lines: the cause, the faulting function,
    and up to :data:`CALLERS` of its callers, each function once if it calls itself.
    For want of memory the stack is that of whoever asked next: in its place comes what
    had none, the machine or a control group.

    :param frames: The frames of :func:`faulting`.
    :param constraint: What had no memory; ``None`` for other causes.
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
