# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a CPU does, by the functions on its stack."""

import pytest

from msatools.cpus.held_cpus import Context, interpret

THREAD = ("worker", "kthread", "ret_from_fork")
CALL = ("vfs_write", "ksys_write", "__x64_sys_write", "do_syscall_64")
TICK = (
    *("tick_nohz_handler", "__hrtimer_run_queues", "hrtimer_interrupt"),
    *("sysvec_apic_timer_interrupt", "asm_sysvec_apic_timer_interrupt"),
)
NMI = (
    "crash_nmi_callback",
    "nmi_handle",
    "default_do_nmi",
    "exc_nmi",
    "end_repeat_nmi",
)
SPIN = ("native_queued_spin_lock_slowpath", "_raw_spin_lock_irqsave")


def of(*names: str, kthread: bool = True, late: bool = False) -> Context:
    return interpret(names, kthread=kthread, late=late)


def test_nothing_is_known() -> None:
    context = of()
    assert (context.function, context.why, context.frames) == (None, None, ())


def test_spins_for_a_lock() -> None:
    context = of(*SPIN, *THREAD)
    assert (context.why, context.function) == ("spins-for-lock", "worker")


def test_suffixes_of_the_compiler() -> None:
    assert of("multi_cpu_stop.isra.0", *THREAD).why == "stopped"


@pytest.mark.parametrize(
    "thunk",
    [
        *("__x86_return_thunk", "its_return_thunk", "srso_alias_return_thunk"),
        *("retbleed_return_thunk", "__x86_indirect_thunk_rax", "srso_safe_ret"),
        "__x86_indirect_its_thunk_r11",
    ],
)
def test_thunk_is_no_function(thunk: str) -> None:
    """Whose return it is is unknown; its caller is on the stack."""
    assert of(thunk, *THREAD).function == "worker"
    assert of(thunk, "handler", "asm_common_interrupt", *THREAD).function == "handler"


def test_call_of_the_scheduler_is_no_such_thunk() -> None:
    assert of("preempt_schedule_thunk", *THREAD).function == "preempt_schedule_thunk"


def test_waits_for_another_cpu() -> None:
    names = ("smp_call_function_many_cond", "on_each_cpu_cond_mask", "drain")
    context = of(*names, *THREAD)
    assert (context.why, context.function) == ("waits-for-call", "drain")


@pytest.mark.parametrize("over", [NMI, TICK, NMI + TICK])
def test_what_passes_does_not_count(over: tuple[str, ...]) -> None:
    context = of(*over, *THREAD)
    assert (context.mode, context.function) == ("task", "worker")
    assert context.skipped == len(over)


def test_tick_counts_where_ticks_are_late() -> None:
    context = of(*TICK, *THREAD, late=True)
    assert (context.mode, context.function) == ("interrupt", "tick_nohz_handler")


def test_interrupt_that_does_not_end() -> None:
    names = ("handler", "__handle_irq_event_percpu", "asm_common_interrupt")
    context = of(*names, *THREAD)
    assert (context.mode, context.why) == ("interrupt", "interrupt")
    assert context.function == "handler"


def test_crash_that_a_watchdog_reports() -> None:
    """What the timer has interrupted is the stall."""
    names = ("__crash_kexec", "panic", "watchdog_timer_fn", *TICK[1:])
    context = of(*names, *THREAD)
    assert (context.crashed, context.why) == (True, "kernel-thread")
    assert context.function == "worker"


def test_crash_of_the_task_itself() -> None:
    context = of("__crash_kexec", "panic", "sysrq_handle_crash", *CALL, kthread=False)
    assert (context.crashed, context.why) == (True, "panic")


def test_cpu_that_a_crash_has_stopped() -> None:
    stopped = ("stop_this_cpu", "sysvec_reboot", "asm_sysvec_reboot")
    context = of(*stopped, *THREAD)
    assert (context.halted, context.function) == (True, "worker")
    # Where nothing was interrupted that is known.
    context = of("stop_this_cpu")
    assert (context.halted, context.why) == (True, "panic")


def test_softirq_after_an_interrupt() -> None:
    names = ("net_rx_action", "handle_softirqs", "__irq_exit_rcu", *TICK[-2:])
    context = of(*names, *THREAD)
    assert (context.mode, context.why) == ("softirq", "softirq")
    assert context.function == "net_rx_action"


def test_softirq_in_its_thread() -> None:
    names = ("tasklet_action", "__do_softirq", "run_ksoftirqd", *THREAD)
    assert of(*names).why == "softirq"


def test_system_call() -> None:
    context = of(*CALL, kthread=False)
    assert (context.why, context.call) == ("system-call", "write")


def test_interrupt_of_a_system_call() -> None:
    names = ("handler", "asm_common_interrupt", *CALL)
    context = of(*names, kthread=False)
    assert (context.why, context.call) == ("interrupt", "write")


def test_user_mode() -> None:
    context = of("", kthread=False)
    assert (context.mode, context.why, context.call) == ("user", "user-mode", None)


def test_lock_within_an_interrupt() -> None:
    """The innermost wait is what a CPU does."""
    names = (*SPIN, "handler", "asm_common_interrupt", *CALL)
    context = of(*names, kthread=False)
    assert (context.why, context.function) == ("spins-for-lock", "handler")
