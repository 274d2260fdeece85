# SPDX-License-Identifier: LGPL-2.1-or-later

"""Stacks are classified: made by hand, and of all tasks in the lab's dumps."""

from collections import Counter

import pytest
from drgn.helpers.linux.sched import task_state_to_char

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.tasks import waits
from msatools.tasks.stacks import StackCollector
from msatools.tasks.waits import TaskClass, classify
from tests.tasks.sleepers import Tasks

SYSCALL = "do_syscall_64 entry_SYSCALL_64_after_hwframe"
FAULT = "handle_mm_fault do_user_addr_fault exc_page_fault asm_exc_page_fault"
WORK = "process_one_work worker_thread kthread ret_from_fork"


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        # Waits as the lab's kernels have them.
        (
            "schedule futex_wait_queue __futex_wait futex_wait do_futex"
            f" __x64_sys_futex {SYSCALL}",
            "LCK",
        ),
        (f"schedule futex_wait_queue_me futex_wait do_futex {SYSCALL}", "LCK"),
        (f"schedule futex_do_wait __futex_wait futex_wait {SYSCALL}", "LCK"),
        (f"schedule do_nanosleep hrtimer_nanosleep common_nsleep {SYSCALL}", "TMR"),
        (f"schedule do_wait kernel_wait4 {SYSCALL}", "WAI"),
        (f"schedule __x64_sys_pause {SYSCALL}", "SIG"),
        (f"schedule pipe_read vfs_read ksys_read {SYSCALL}", "PIP"),
        (f"schedule anon_pipe_read vfs_read ksys_read {SYSCALL}", "PIP"),
        (f"schedule wait_woken n_tty_read tty_read vfs_read {SYSCALL}", "TTY"),
        (
            "schedule schedule_hrtimeout_range_clock schedule_hrtimeout_range do_select"
            f" core_sys_select {SYSCALL}",
            "POL",
        ),
        (
            f"schedule schedule_timeout inet_csk_accept inet_accept {SYSCALL}",
            "NET",
        ),
        (f"schedule io_cqring_wait __do_sys_io_uring_enter {SYSCALL}", "URG"),
        # As on 6.1 for arm64, where the others are inlined.
        (
            "schedule schedule_hrtimeout_range_clock schedule_hrtimeout"
            " __arm64_sys_io_uring_enter invoke_syscall el0_svc_common do_el0_svc",
            "URG",
        ),
        # Where do_sigtimedwait() is inlined.
        (
            "schedule schedule_hrtimeout_range_clock __x64_sys_rt_sigtimedwait"
            f" {SYSCALL}",
            "SIG",
        ),
        (f"schedule do_msgrcv {SYSCALL}", "IPC"),
        (f"schedule ptrace_stop get_signal arch_do_signal_or_restart {SYSCALL}", "TRC"),
        (f"schedule do_signal_stop get_signal {SYSCALL}", "STP"),
        (f"schedule get_signal arch_do_signal_or_restart {SYSCALL}", "STP"),
        # The innermost wins.
        (
            "schedule schedule_preempt_disabled __mutex_lock.constprop.0 pipe_read"
            f" vfs_read ksys_read {SYSCALL}",
            "KLK",
        ),
        # Disk I/O for a fault or reclaim counts as the fault or reclaim.
        (f"schedule io_schedule folio_wait_bit_common filemap_fault {FAULT}", "FLT"),
        (f"schedule io_schedule wait_on_page_bit_common filemap_fault {FAULT}", "FLT"),
        (f"schedule io_schedule folio_wait_bit_common do_swap_page {FAULT}", "SWP"),
        (
            "schedule io_schedule rq_qos_wait swap_writepage shrink_folio_list"
            f" shrink_node do_try_to_free_pages __alloc_pages_slowpath {FAULT}",
            "RCL",
        ),
        (
            "schedule io_schedule folio_wait_bit_common filemap_read vfs_read"
            f" ksys_read {SYSCALL}",
            "DSK",
        ),
        # A lock within a fault counts as a lock.
        (
            "schedule rwsem_down_read_slowpath down_read_killable"
            f" lock_mm_and_find_vma do_user_addr_fault {FAULT}",
            "KLK",
        ),
        (f"schedule percpu_rwsem_wait __percpu_down_read {FAULT}", "KLK"),
        # A PI futex uses an rt_mutex; another rt_mutex is a kernel lock.
        (
            "schedule rt_mutex_slowlock_block.constprop.0 rt_mutex_wait_proxy_lock"
            f" futex_lock_pi do_futex {SYSCALL}",
            "LCK",
        ),
        (f"schedule rt_mutex_slowlock_block mutex_lock pipe_read {SYSCALL}", "KLK"),
        (
            f"schedule rwsem_down_read_slowpath get_futex_key futex_lock_pi {SYSCALL}",
            "KLK",
        ),
        # The purpose of a completion determines its class.
        (
            f"schedule_timeout wait_for_completion_state kernel_clone {SYSCALL}",
            "WAI",
        ),
        (
            "schedule_timeout io_schedule_timeout wait_for_completion_io_timeout"
            f" blk_execute_rq {SYSCALL}",
            "DSK",
        ),
        ("schedule schedule_timeout wait_for_completion xfs_buf_iowait f", "DSK"),
        ("schedule schedule_timeout wait_for_completion a_module_does", "KLK"),
        ("schedule schedule_timeout wait_for_completion __flush_work xfs_f", "KLK"),
        # A kernel thread is idle if its own function sleeps, otherwise it is busy.
        ("schedule worker_thread kthread ret_from_fork ret_from_fork_asm", "KTW"),
        ("schedule schedule_timeout kcompactd kthread ret_from_fork", "KTW"),
        ("schedule a_modules_thread kthread ret_from_fork", "KTW"),
        ("schedule xfsaild kthread ret_from_fork", "KTW"),
        ("io_schedule a_modules_thread kthread ret_from_fork", "DSK"),
        (f"schedule schedule_timeout msleep a_driver_does {WORK}", "TMR"),
        (f"schedule io_schedule bit_wait_io __wait_on_buffer {WORK}", "DSK"),
        (f"schedule schedule_preempt_disabled __mutex_lock {WORK}", "KLK"),
        ("schedule io_schedule rq_qos_wait shrink_node balance_pgdat kswapd", "RCL"),
        (f"schedule a_driver_does {WORK}", "KTW"),
        # Only the system call is known.
        (f"schedule a_driver_reads vfs_read ksys_read __x64_sys_read {SYSCALL}", "PIP"),
        ("schedule new __arm64_sys_futex invoke_syscall el0_svc", "LCK"),
        ("schedule new __ia32_compat_sys_wait4 do_int80_syscall_32", "WAI"),
        ("schedule new __ia32_sys_futex_time32 do_int80_syscall_32", "LCK"),
        (f"schedule a_driver_does __x64_sys_ioctl {SYSCALL}", "OTH"),
        # Tasks that are about to run.
        ("ret_from_fork_asm", "LAT"),
        (f"schedule exit_to_user_mode_loop {SYSCALL}", "LAT"),
        ("preempt_schedule_common __cond_resched down_read f", "LAT"),
        ("schedule do_sched_yield __x64_sys_sched_yield f", "LAT"),
        # The same, where compilers inline what is called once.
        (f"schedule syscall_exit_to_user_mode {SYSCALL}", "LAT"),
        ("schedule do_notify_resume el0_da el0t_64_sync_handler", "LAT"),
        (f"schedule __x64_sys_sched_yield {SYSCALL}", "LAT"),
        ("", "OTH"),
        ("0xffffffffc0123456", "OTH"),
    ],
)
def test_class(stack: str, expected: str) -> None:
    names = tuple(stack.split())
    assert classify(names).task_class.name == expected
    if names and names[0] == "schedule":
        assert classify(("__schedule", *names)).task_class.name == expected


@pytest.mark.parametrize(
    ("stack", "preempted"),
    [
        (f"schedule syscall_exit_to_user_mode {SYSCALL}", True),
        ("schedule do_notify_resume el0_interrupt __el0_irq_handler_common", True),
        (f"schedule __x64_sys_sched_yield {SYSCALL}", True),
        ("ret_from_fork_asm", True),
        # It sleeps on the way to user mode.
        (f"schedule get_signal arch_do_signal_or_restart {SYSCALL}", False),
        ("schedule io_schedule do_exit do_notify_resume el0_svc", False),
        ("schedule worker_thread kthread ret_from_fork_asm", False),
    ],
)
def test_who_lost_its_cpu_has_not_slept(stack: str, preempted: bool) -> None:
    assert classify(("__schedule", *stack.split())).preempted is preempted


@pytest.mark.parametrize(
    ("stack", "caller", "call"),
    [
        (
            "__schedule schedule schedule_preempt_disabled __mutex_lock.constprop.0"
            f" mutex_lock pipe_read.isra.0 vfs_read ksys_read __x64_sys_read {SYSCALL}",
            "pipe_read",
            "read",
        ),
        (
            "__schedule schedule rwsem_down_write_slowpath down_write_killable"
            f" vm_mmap_pgoff ksys_mmap_pgoff __x64_sys_mmap {SYSCALL}",
            "vm_mmap_pgoff",
            "mmap",
        ),
        (
            "__schedule schedule schedule_timeout __wait_for_common"
            f" wait_for_completion_state kernel_clone __do_sys_vfork {SYSCALL}",
            "kernel_clone",
            "vfork",
        ),
        ("__schedule schedule worker_thread kthread", "worker_thread", None),
        ("__schedule schedule", None, None),
    ],
)
def test_caller(stack: str, caller: str | None, call: str | None) -> None:
    found = classify(tuple(stack.split()))
    assert (found.caller, found.call) == (caller, call)


@pytest.mark.parametrize("table", ["WAITS", "SLEEPERS", "SUBSYSTEMS", "WAYS", "CALLS"])
def test_no_name_has_two_classes(table: str) -> None:
    names = Counter(" ".join(getattr(waits, table).values()).split())
    assert [name for name, count in names.items() if count > 1] == []


def test_classes_are_those_of_the_contract() -> None:
    assert " ".join(cls.name for cls in TaskClass) == (
        "CPU USR SYS INT LAT LCK KLK FLK POL FLT SWP RCL DSK PIP NET TMR WAI SIG IPC"
        " TTY URG KTW STP TRC ZMB OTH WAK"
    )


def classes(tasks: Tasks) -> dict[int, tuple[TaskClass, tuple[str, ...]]]:
    """Classify all tasks that have a stack, by thread ID."""
    collector = StackCollector(Reader(tasks.prog), LossLog())
    found = collector.collect(tasks.tasks, tasks.stacks, tasks.pointers)
    by_tid = {}
    for row, task in enumerate(tasks.objects):
        if tasks.stacks[row]:
            names = found.names(found[row])
            by_tid[task.pid.value_()] = classify(names).task_class, names
    return by_tid


def test_every_task_has_a_class(idle: Tasks) -> None:
    by_tid = classes(idle)
    threads = {task.pid.value_(): task for task in idle.objects if not task.mm}
    # A worker may have been woken, or begun to write to a disk.
    resting = {pid for pid, each in threads.items() if task_state_to_char(each) in "SI"}
    assert len(resting) > len(threads) / 2
    for pid, (task_class, names) in by_tid.items():
        assert task_class is not TaskClass.OTH, names
        if task_class is TaskClass.KTW:
            assert pid in threads, names
        else:
            assert pid not in resting, names
    counts = Counter(task_class.name for task_class, _ in by_tid.values())
    if idle.name.startswith("memory"):
        assert counts["LCK"] == 64  # the threads on a condition variable
    assert counts["SIG"] >= 4
    assert counts["TMR"] >= 1
    assert counts["WAI"] == 1
