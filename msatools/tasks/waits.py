# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a task waits for, by the functions on its stack.

Also the tables of the kernel's functions that wait: a function that a new kernel adds
is to be added there.
"""

import re
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt
from msgspec import Struct

# --- Classes of what a task is doing now.


class TaskClass(IntEnum):
    """What a task is doing now; the names appear in the output."""

    CPU = 0
    """It runs; on a live kernel its mode is unknown."""
    USR = 1
    """It runs in user mode."""
    SYS = 2
    """It runs in the kernel."""
    INT = 3
    """Its CPU handles an interrupt."""
    LAT = 4
    """It waits for a CPU."""
    LCK = 5
    """It waits for a futex."""
    KLK = 6
    """It waits for a lock, or another thread's work, within the kernel."""
    FLK = 7
    """It waits for a lock on a file."""
    POL = 8
    """It waits for events (poll, select, epoll), or is a virtual CPU that is halted."""
    FLT = 9
    """It waits in a page fault."""
    SWP = 10
    """It waits for a page that was swapped out."""
    RCL = 11
    """It waits for memory reclaim, or by the limit of its memory cgroup."""
    DSK = 12
    """It waits for a disk, a local or network file system, or another device."""
    PIP = 13
    """It waits for data of a pipe or of a pipe-like file."""
    NET = 14
    """It waits for a socket."""
    TMR = 15
    """It waits for a time to pass."""
    WAI = 16
    """It waits for another process."""
    SIG = 17
    """It waits for a signal."""
    IPC = 18
    """It waits for a message queue or semaphore of System V or POSIX, or Binder."""
    TTY = 19
    """It waits for a terminal."""
    URG = 20
    """It waits for io_uring."""
    KTW = 21
    """It is a kernel thread that waits for work."""
    STP = 22
    """It is stopped or frozen."""
    TRC = 23
    """It waits for its tracer."""
    ZMB = 24
    """It is dead."""
    OTH = 25
    """It waits for something else, or its class is unknown."""
    WAK = 26
    """It is being woken and is not on a run queue yet."""


RUNNABLE = (
    *(TaskClass.CPU, TaskClass.USR, TaskClass.SYS, TaskClass.INT),
    TaskClass.LAT,
)
"""Classes of threads that run or could run."""


def are_any(
    classes: npt.NDArray[np.uint8], wanted: Sequence[TaskClass]
) -> npt.NDArray[np.bool_]:
    """Return whether each class is one of the wanted ones.

    np.isin() takes ten times as long for some hundred tasks, and each sample of a
    running kernel calls this a dozen times.
    """
    matches: npt.NDArray[np.bool_] = _wanted(tuple(wanted))[classes]
    return matches


@cache
def _wanted(classes: tuple[TaskClass, ...]) -> npt.NDArray[np.bool_]:
    wanted = np.zeros(np.iinfo(np.uint8).max + 1, np.bool_)
    wanted[list(classes)] = True
    return wanted


# --- The kernel's functions that wait, by what they wait for.
#
# Function names differ by version, and functions that the compiler inlined are not on
# stacks unwound by ORC. So the tables have the names of all versions, and callers
# beside their callees: those of Linux 5.10, 6.1 and 6.12, and the known ones of newer
# versions.


VFORK = ("wait_for_vfork_done", "kernel_clone", "_do_fork")
"""Functions in which a parent sleeps in vfork(): wait_for_vfork_done() may be inlined
into kernel_clone(), which was _do_fork() before cad6967ac108 ("fork: introduce
kernel_clone()") (in v5.10)."""

# A trailing * matches any suffix. Suffixes that compilers add, such as .isra.0, are
# ignored.

# Functions that wait, by class: the innermost one on a stack decides.
WAITS = {
    TaskClass.LCK: """
        futex_wait futex_wait_queue __futex_wait futex_do_wait futex_wait_queue_me
        futex_wait_multiple __futex_wait_multiple futex_wait_requeue_pi
        futex_lock_pi rt_mutex_wait_proxy_lock
    """,
    TaskClass.KLK: """
        __mutex_lock* mutex_lock* __ww_mutex_lock* ww_mutex_lock*
        rwsem_down_* down_read down_read_* down_write down_write_*
        __down __down_common __down_interruptible __down_killable __down_timeout
        down down_interruptible down_killable down_timeout ldsem_down_*
        __rt_mutex_slowlock* rt_mutex_slowlock* rt_mutex_lock* rtlock_slowlock*
        rt_spin_lock* rt_read_lock rt_write_lock rwbase_* __rwbase_*
        percpu_rwsem_wait percpu_down_write __percpu_down_read
        __lock_sock lock_sock_nested netlink_table_grab
        synchronize_rcu* __synchronize_srcu synchronize_srcu* __wait_rcu_gp
        rcu_barrier* srcu_barrier rcu_sync_enter exp_funnel_lock
        __flush_work flush_work __flush_workqueue flush_workqueue __cancel_work*
        cancel_work_sync cancel_delayed_work_sync drain_workqueue
        kthread_stop kthread_park kthread_flush_work kthread_flush_worker
        __kthread_create_on_node stop_one_cpu stop_two_cpus __stop_cpus stop_machine*
        smp_call_on_cpu cpuhp_* _cpu_down affine_move_task wait_task_inactive
        kernfs_drain kernfs_remove_self proc_entry_rundown proc_reg_release klist_remove
        percpu_ref_switch_* __percpu_ref_switch_mode pin_kill acct_pin_kill
        cgroup_lock_and_drain_offline async_synchronize_cookie_domain
        idempotent_init_module module_patient_check_exists expand_files
        fsnotify_destroy_group fsnotify_sb_delete mmu_interval_*
        super_lock grab_super __get_super_thawed get_super_thawed freeze_super
        perf_event_exit_task_context perf_event_free_task
        __synchronize_irq synchronize_irq tasklet_kill tasklet_unlock_wait
        napi_disable* wait_for_device_probe __pm_runtime_barrier rpm_resume rpm_suspend
        audit_log_start audit_receive crypto_larval_wait crypto_wait_for_test
        __kernfs_remove load_module put_unbound_pool memfd_fcntl vga_get
        rtnl_link_unregister genl_unregister_family default_device_exit_batch
        dev_deactivate_many hook_sb_delete sync_rcu_* __sync_rcu_* rcu_exp_wait_wake
        __usermodehelper_disable cpuset_handle_hotplug cpuset_hotplug_workfn
        wait_attach_done_lock sched_cpu_wait_empty native_cpu_up irq_work_sync
        cpufreq_freq_transition_begin wait_for_kprobe_optimizer* perf_pmu_unregister
        rcu_nocb_rdp_* rcu_nocb_cpu_* __request_region_locked drain_descendants
        rcu_tasks_trace_postgp __request_region
        wake_up_and_wait_for_irq_thread_ready serial_core_unregister_port
        memfd_add_seals sget_fc fserror_unmount
    """,
    TaskClass.FLK: """
        flock_lock_inode_wait locks_lock_inode_wait posix_lock_inode_wait
        do_lock_file_wait fcntl_setlk fcntl_setlk64 __break_lease locks_mandatory_area
        nlmclnt_block nlmclnt_wait
    """,
    TaskClass.POL: """
        do_poll do_sys_poll do_select core_sys_select poll_schedule_timeout
        ep_poll do_epoll_wait
        kvm_vcpu_block kvm_vcpu_halt kvm_vcpu_check_block
    """,
    TaskClass.FLT: """
        filemap_fault handle_mm_fault __handle_mm_fault __do_fault do_fault
        do_user_addr_fault exc_page_fault asm_exc_page_fault do_page_fault
        do_mem_abort faultin_page fixup_user_fault hugetlb_fault handle_userfault
        do_wp_page wp_page_copy do_numa_page do_anonymous_page migration_entry_wait
        __migration_entry_wait migration_entry_wait_on_locked shmem_fault
        softleaf_entry_wait softleaf_entry_wait_on_locked
        kvm_async_pf_task_wait_schedule kvm_async_pf_task_wait
        userfaultfd_event_wait_completion __fuse_dax_fault
    """,
    TaskClass.SWP: """
        do_swap_page swap_readpage swap_read_page swap_read_folio
        read_swap_cache_async __read_swap_cache_async swapin_readahead
        swap_cluster_readahead shmem_swapin shmem_swapin_folio shmem_swapin_cluster
        shmem_swapin_page
    """,
    TaskClass.RCL: """
        try_to_free_pages try_to_free_mem_cgroup_pages do_try_to_free_pages
        shrink_node* shrink_lruvec shrink_one shrink_many shrink_zones shrink_slab*
        do_shrink_slab shrink_inactive_list shrink_active_list shrink_folio_list
        shrink_page_list shrink_list evict_folios try_to_inc_max_seq balance_pgdat
        compact_zone compact_zone_order compact_node try_to_compact_pages
        __alloc_pages_slowpath __alloc_pages_direct_reclaim
        __alloc_pages_direct_compact node_reclaim __node_reclaim
        reclaim_throttle throttle_direct_reclaim too_many_isolated
        congestion_wait wait_iff_congested
        try_charge try_charge_memcg mem_cgroup_handle_over_high
        __mem_cgroup_handle_over_high mem_cgroup_oom_synchronize
        out_of_memory mem_cgroup_out_of_memory mempool_alloc*
    """,
    TaskClass.DSK: """
        io_schedule io_schedule_timeout bit_wait_io bit_wait_io_timeout blk_io_schedule
        folio_wait_bit* __folio_lock* folio_wait_writeback* wait_on_page_bit*
        __lock_page* wait_on_page_writeback __wait_on_buffer __lock_buffer
        blk_wait_io wait_for_completion_io wait_for_completion_io_timeout
        blk_mq_get_tag __blk_mq_alloc_request* rq_qos_wait wbt_wait ioc_rqos_throttle
        blkcg_maybe_throttle_current __blkcg_maybe_throttle_current
        blk_queue_enter __bio_queue_enter bio_queue_enter blk_mq_freeze_queue_wait*
        blk_execute_rq submit_bio_wait bio_await_chain blk_mq_poll blk_poll
        balance_dirty_pages balance_dirty_pages_ratelimited*
        wb_wait_for_completion inode_wait_for_writeback __inode_wait_for_writeback
        inode_sleep_on_writeback wait_sb_inodes
        jbd2_log_wait_commit jbd2_journal_commit_transaction jbd2_journal_lock_updates
        jbd2_journal_wait_updates jbd2_journal_stop jbd2_fc_begin_commit
        wait_transaction_locked wait_transaction_switching add_transaction_credits
        start_this_handle do_get_write_access
        inode_dio_wait inode_dio_wait_interruptible __inode_dio_wait
        do_blockdev_direct_IO __blockdev_direct_IO iomap_dio_rw __iomap_dio_rw
        iget_locked iget5_locked iget5_locked_rcu ilookup ilookup5 inode_insert5
        insert_inode_locked insert_inode_locked4 find_inode find_inode_fast
        __wait_on_freeing_inode d_alloc_parallel bd_prepare_to_claim
        dqget dquot_disable quotactl_block mb_cache_entry_wait_unused
        read_events io_sync_cancel exit_aio closure_sync __closure_sync
        closure_return_sync closure_sync_timeout __closure_sync_timeout
        request_wait_answer fuse_get_req fuse_wait_on_page_writeback
        get_unlocked_entry wait_entry_unlocked* get_next_unlocked_entry
        dax_break_layout_final pseudo_lock_measure_trigger wait_on_new_inode
        cgroup_writeback_umount blkcg_init_disk pm_sleep_fs_sync
        rpc_wait_bit_killable __rpc_execute rpc_execute nfs_wait_bit_killable
        ceph_mdsc_wait_request ceph_osdc_wait_request wait_for_response
        dma_fence_default_wait dma_fence_wait_timeout dma_fence_wait_any_timeout
        dma_resv_wait_timeout __ext4_iget evict shmem_evict_inode hib_wait_io
    """,
    TaskClass.PIP: """
        pipe_read pipe_write anon_pipe_read anon_pipe_write fifo_open wait_for_partner
        fifo_pipe_read fifo_pipe_write pipe_wait_readable pipe_wait_writable
        eventfd_read eventfd_write inotify_read fanotify_read fuse_dev_do_read
        userfaultfd_read userfaultfd_read_iter userfaultfd_ctx_read devkmsg_read
        syslog_print do_syslog ring_buffer_wait wait_port_writable port_fops_read
        rng_dev_read wait_for_random_bytes try_to_generate_entropy ns_revision_read
        hpet_read rtc_dev_read ptp_read pps_cdev_pps_fetch xenbus_file_read
    """,
    TaskClass.NET: """
        unix_stream_data_wait unix_stream_read_generic unix_wait_for_peer
        wait_for_unix_gc __skb_wait_for_more_packets inet_csk_accept
        inet_csk_wait_for_connect inet_wait_for_connect __inet_stream_connect
        sk_wait_data tcp_msg_wait_data sk_stream_wait_* sock_alloc_send_pskb
        sock_wait_for_wmem netlink_attachskb vsock_* sctp_wait_for_*
    """,
    TaskClass.TMR: """
        do_nanosleep hrtimer_nanosleep alarmtimer_do_nsleep alarm_timer_nsleep
        do_cpu_nanosleep posix_cpu_nsleep timerfd_read timerfd_read_iter
    """,
    TaskClass.WAI: """
        do_wait kernel_wait4 kernel_waitid wait_for_vfork_done kernel_clone _do_fork
        do_coredump vfs_coredump coredump_wait coredump_task_exit begin_new_exec
        flush_old_exec
        de_thread zap_pid_ns_processes call_usermodehelper_exec __request_module
        usermodehelper_read_lock_wait usermodehelper_read_trylock _request_firmware
        seccomp_do_user_notification fanotify_handle_event fanotify_get_response
        tomoyo_supervisor ptrace_check_attach
    """,
    TaskClass.SIG: """
        __do_sys_pause do_sigtimedwait __do_sys_rt_sigtimedwait
        __x64_sys_rt_sigtimedwait __arm64_sys_rt_sigtimedwait sigsuspend
        __do_sys_rt_sigsuspend
        signalfd_read signalfd_read_iter signalfd_dequeue
    """,
    TaskClass.IPC: """
        do_msgrcv do_msgsnd __do_semtimedop do_semtimedop wq_sleep do_mq_timedreceive
        do_mq_timedsend binder_wait_for_work binder_thread_read
    """,
    TaskClass.TTY: """
        n_tty_read n_tty_write tty_open tty_port_block_til_ready tty_port_close_start
        tty_port_close_end tty_wait_until_sent tty_release tty_reopen
        __vt_event_wait vt_waitactive paste_selection send_break set_termios
        uart_wait_modem_status uart_wait_until_sent job_control tty_check_change
    """,
    TaskClass.URG: """
        io_cqring_wait io_cqring_schedule_timeout __do_sys_io_uring_enter
        __x64_sys_io_uring_enter __arm64_sys_io_uring_enter
        __do_sys_io_uring_register io_sqpoll_wait_sq io_uring_cancel_generic
        io_uring_del_tctx_node io_rsrc_ref_quiesce io_wq_put_and_exit io_sq_thread_stop
        io_sqd_handle_event
    """,
    TaskClass.STP: """
        do_signal_stop __refrigerator do_freezer_trap cgroup_enter_frozen
    """,
    TaskClass.TRC: """
        ptrace_stop ptrace_do_notify ptrace_notify ptrace_signal
    """,
}

# Functions that call the scheduler when a runnable task loses its CPU: it is preempted,
# yields, or has not run yet. The loop that runs on the return to user mode may be
# inlined into any of its callers.
PREEMPTIONS = """
    preempt_schedule* arm64_preempt_schedule_irq __cond_resched*
    exit_to_user_mode* arm64_exit_to_user_mode* syscall_exit_to_user_mode*
    irqentry_exit* raw_irqentry_exit_* do_notify_resume el0_*
    xfer_to_guest_mode_handle_work uprobe_notify_resume
    do_sched_yield yield yield_to ret_from_fork*
"""

# Functions that decide only if they called the scheduler themselves: further out they
# are also on the stacks of tasks that work.
SLEEPERS = {
    TaskClass.KTW: """
        worker_thread rescuer_thread smpboot_thread_fn kthreadd kthread
        kthread_worker_fn __kthread_parkme devtmpfs_work_loop irq_thread
        irq_wait_for_interrupt do_idle rcu_gp_fqs_loop rcu_gp_kthread
        rcu_tasks_one_gp rcu_tasks_wait_gp rcu_nocb_gp_wait rcu_nocb_cb_wait
        kswapd_try_to_sleep
        vhost_task_fn vhost_worker svc_recv svc_get_next_xprt
        nbcon_kthread_func napi_threaded_poll
    """,
    TaskClass.URG: "io_wq_worker io_wqe_worker io_sq_thread",
    TaskClass.STP: "get_signal",
    TaskClass.ZMB: "do_task_dead",
    # A thread waits there for the core dump of its process (the compiler inlined the
    # wait). A dead thread is recognized by its exit_state.
    TaskClass.WAI: "do_exit",
    TaskClass.LAT: PREEMPTIONS,
}

# If no function of WAITS is on the stack, the innermost one of a subsystem decides.
SUBSYSTEMS = {
    TaskClass.DSK: """
        ext4_* jbd2_* xfs_* xlog_* xfsaild btrfs_* f2fs_* gfs2_* ocfs2_* nfs_* nfs3_*
        nfs4_* rpc_* xprt_* ceph_* rbd_* cifs_* smb2_* smb3_* fuse_* virtio_fs_*
        overlay_* ovl_* erofs_* squashfs_* afs_* v9fs_* p9_* zfs_* zil_* zio_* txg_*
        dmu_* dm_* __dm_* md_* mddev_* raid0_* raid1_* raid10_* raid5_* bcache_*
        cached_dev_* drbd_* blk_* __blk_* bio_* blkdev_* __blkdev_* nvme_* scsi_* sd_*
        sg_* st_* ata_* loop_* nbd_* virtblk_* iomap_* writeback_* wb_* sync_*
        generic_file_* filemap_* __filemap_* jfs_* nilfs_* udf_* fat_* ntfs_* exfat_*
        drm_* amdgpu_* radeon_* i915_* xe_* nouveau_* nv_* dma_fence_* dma_resv_*
    """,
    TaskClass.NET: """
        tcp_* tcpv6_* udp_* udpv6_* inet_* inet6_* unix_* netlink_* packet_* sk_* sock_*
        __sock_* raw_* rawv6_* sctp_* mptcp_* tls_* tipc_* smc_* rds_* vsock_* bt_*
        l2cap_* rfcomm_* can_* ax25_* x25_* llc_* kcm_* xsk_* tun_* macvtap_* ping_*
        rxrpc_* pppol2tp_* af_alg_*
    """,
    TaskClass.TTY: "tty_* n_tty_* uart_* pty_* con_* vt_* hvc_* serial8250_*",
    TaskClass.PIP: "pipe_* splice_* __splice_* fsnotify_* inotify_* fanotify_*",
    TaskClass.URG: "io_uring_* io_ring_* io_sq_* io_wq_*",
    TaskClass.IPC: "binder_*",
    TaskClass.POL: "kvm_vcpu_* kvm_arch_vcpu_*",
}

# Else the innermost general wait function that implies a class.
WAYS = {
    TaskClass.KLK: """
        wait_for_completion* __wait_for_common wait_for_common
        __wait_on_bit* out_of_line_wait_on_bit* bit_wait bit_wait_timeout
    """,
    TaskClass.TMR: "msleep* usleep_range* fsleep schedule_hrtimeout*",
}

# Else the system call.
CALLS = {
    TaskClass.LCK: "futex futex_wait futex_waitv futex_requeue",
    TaskClass.FLK: "flock fcntl fcntl64",
    TaskClass.POL: """
        poll ppoll select pselect6 epoll_wait epoll_pwait epoll_pwait2 old_select
    """,
    TaskClass.RCL: "process_mrelease",
    TaskClass.SWP: "swapon swapoff",
    TaskClass.DSK: """
        io_submit io_getevents io_pgetevents io_cancel io_destroy io_setup
        sync syncfs fsync fdatasync sync_file_range msync open openat openat2 creat
        close close_range stat lstat fstat newstat newlstat newfstat newfstatat statx
        stat64 lstat64 fstat64 fstatat64 statfs fstatfs access faccessat faccessat2
        getdents getdents64 rename renameat renameat2 unlink unlinkat link linkat
        symlink symlinkat readlink readlinkat mkdir mkdirat mknod mknodat rmdir
        truncate ftruncate fallocate chdir fchdir chroot chmod fchmod fchmodat chown
        lchown fchown fchownat utime utimes utimensat futimesat
        setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr
        flistxattr removexattr lremovexattr fremovexattr quotactl quotactl_fd
        mount umount umount2 oldumount fsopen fsmount fsconfig move_mount open_tree
        pivot_root sendfile sendfile64 copy_file_range readahead fadvise64
        fadvise64_64 execve execveat acct open_by_handle_at name_to_handle_at
    """,
    TaskClass.PIP: """
        read pread64 readv preadv preadv2 write pwrite64 writev pwritev pwritev2
        splice tee vmsplice syslog getrandom
    """,
    TaskClass.NET: """
        accept accept4 connect recv recvfrom recvmsg recvmmsg send sendto sendmsg
        sendmmsg shutdown bind listen socket socketpair getsockopt setsockopt socketcall
    """,
    TaskClass.TMR: "nanosleep clock_nanosleep",
    TaskClass.WAI: """
        wait4 waitid waitpid fork vfork clone clone3 exit exit_group ptrace kill
        process_madvise process_vm_readv process_vm_writev
    """,
    TaskClass.SIG: """
        pause sigsuspend rt_sigsuspend rt_sigtimedwait signal signalfd signalfd4
    """,
    TaskClass.IPC: """
        msgrcv msgsnd msgctl semop semtimedop semctl ipc mq_timedreceive mq_timedsend
        mq_open mq_unlink shmat shmdt shmctl
    """,
    TaskClass.URG: "io_uring_enter io_uring_register io_uring_setup",
    TaskClass.KLK: """
        init_module finit_module delete_module membarrier perf_event_open bpf
        mmap mmap_pgoff munmap mremap mprotect brk madvise mlock mlock2 mlockall munlock
        munlockall mbind migrate_pages move_pages setns unshare sched_setaffinity
        userfaultfd keyctl add_key request_key
    """,
    TaskClass.LAT: "sched_yield",
}

# Functions of the scheduler, and those that only call it.
SCHEDULER = """
    __schedule schedule schedule_timeout* schedule_preempt_disabled schedule_hrtimeout*
    schedule_idle schedule_rtlock __switch_to* wait_woken do_wait_intr do_wait_intr_irq
    msleep* usleep_range* fsleep swait_* prepare_to_swait* schedule_with_*
"""

# Generic locks and waits: their caller is reported as the function that waits.
LOCKS = """
    preempt_schedule* __cond_resched* io_schedule*
    __mutex_lock* mutex_lock* __ww_mutex_lock* ww_mutex_lock*
    rwsem_down_* down_read down_read_* down_write down_write_*
    __down __down_common __down_interruptible __down_killable __down_timeout
    down down_interruptible down_killable down_timeout ldsem_down_*
    __rt_mutex_* rt_mutex_* rtlock_* rt_spin_lock* rt_read_lock rt_write_lock
    rwbase_* __rwbase_*
    percpu_rwsem_wait percpu_down_write __percpu_down_read
    wait_for_completion* __wait_for_common wait_for_common
    __wait_on_bit* out_of_line_wait_on_bit* bit_wait* folio_wait_bit* __folio_lock*
    wait_on_page_bit* __lock_page* __wait_on_buffer __lock_buffer blk_wait_io
"""

THREAD_START = frozenset({"kthread", "ret_from_fork", "ret_from_fork_asm"})

_THUNK = re.compile(
    r"\w*return_thunk|__x86_indirect_\w*thunk\w*|its_static_thunk|"
    r"(srso|srso_alias)_safe_ret|\w+_untrain_ret"
)
"""Thunks of x86 against speculation (arch/x86/lib/retpoline.S)."""


def is_thunk(function: str) -> bool:
    """Return whether a function is a thunk: code that only replaces the return of
    another function, or an indirect jump."""
    return bool(_THUNK.fullmatch(function.partition(".")[0]))


# A task that reads a page in for itself waits for the page, not for the disk.
MEMORY = frozenset({TaskClass.FLT, TaskClass.SWP, TaskClass.RCL})


def function_text(name: str | None, module: str | None) -> str | None:
    """Return a function with its module, ``f [module]``; ``None`` if it is unknown."""
    return f"{name} [{module}]" if name and module else name


# --- Classify the wait of a task that does not run, by the functions on its stack.


class StackWait(Struct, frozen=True):
    """What a task waits for, by its stack."""

    task_class: TaskClass

    function: str | None
    """The function that decided on the class; ``None`` if not found."""

    caller: str | None
    """The innermost function that is not part of a generic wait or lock."""

    call: str | None
    """The system call, such as ``futex``; ``None`` if none is on the stack."""

    preempted: bool = False
    """Whether the task lost its CPU while it was runnable."""


_CALL = re.compile(
    r"(?:__[a-z0-9]+_(?:compat_)?|__compat_|compat_|__|k)?sys_(\w+?)"
    r"(?:_time32|_time64)?"
)


class _WaitNames:
    """Maps names of functions to classes, by a table such as ``WAITS``."""

    def __init__(self, table: dict[TaskClass, str]) -> None:
        self._exact: dict[str, TaskClass] = {}
        prefixes: list[tuple[str, TaskClass]] = []
        for task_class, names in table.items():
            for name in names.split():
                if name.endswith("*"):
                    prefixes.append((name[:-1], task_class))
                else:
                    self._exact[name] = task_class
        # The longest first, as the most specific.
        self._prefixes = sorted(prefixes, key=lambda pair: -len(pair[0]))
        # The same functions are on most stacks.
        self._cache: dict[str, TaskClass | None] = {}

    def get(self, name: str) -> TaskClass | None:
        if name not in self._cache:
            self._cache[name] = self._find(name)
        return self._cache[name]

    def _find(self, name: str) -> TaskClass | None:
        found = self._exact.get(name)
        if found is not None:
            return found
        for prefix, task_class in self._prefixes:
            if name.startswith(prefix):
                return task_class
        return None

    def first(self, names: Iterable[str]) -> tuple[TaskClass, str] | None:
        for name in names:
            found = self.get(name)
            if found is not None:
                return found, name
        return None


def _set(names: str) -> _WaitNames:
    return _WaitNames({TaskClass.OTH: names})


_BY_WAIT = _WaitNames(WAITS)
_BY_SLEEPER = _WaitNames(SLEEPERS)
_BY_SUBSYSTEM = _WaitNames(SUBSYSTEMS)
_BY_WAY = _WaitNames(WAYS)
_BY_CALL = _WaitNames(CALLS)
_IS_SCHEDULER = _set(SCHEDULER)
_IS_LOCK = _set(SCHEDULER + LOCKS)
_IS_PI_FUTEX = _set("futex_lock_pi futex_wait_requeue_pi")
_IS_RT_MUTEX = _set("__rt_mutex_* rt_mutex_*")


@lru_cache(maxsize=4096)
def classify(stack: tuple[str, ...]) -> StackWait:
    """
    Classify the wait of a task that does not run.

    Only the stack is considered, not the task's state (runnable, stopped, traced,
    dead). For a runnable task the result is the sleep that has just ended, unless the
    stack has one of :data:`msatools.tasks.waits.PREEMPTIONS`.

    :param stack: Functions of the kernel, innermost first.
    """
    names = [name.partition(".")[0] for name in stack]
    known = _class_of(names)
    task_class, function = known if known else (TaskClass.OTH, None)
    callers = (name for name in names if _IS_LOCK.get(name) is None)
    caller = next((name for name in callers if not is_thunk(name)), None)
    calls = (_CALL.fullmatch(name) for name in reversed(names))
    call = next((matched[1] for matched in calls if matched), None)
    way = next((name for name in names if _IS_SCHEDULER.get(name) is None), None)
    preempted = way is None or task_class is TaskClass.LAT
    return StackWait(task_class, function, caller, call, preempted)


def _class_of(names: list[str]) -> tuple[TaskClass, str] | None:
    sleeper = next(
        (i for i, name in enumerate(names) if _IS_SCHEDULER.get(name) is None), None
    )
    is_thread = any(name in THREAD_START for name in names[-3:])
    if sleeper is not None:
        known = _BY_SLEEPER.get(names[sleeper])
        if known is None and names[sleeper + 1 : sleeper + 2] == ["kthread"]:
            # The main function of a kernel thread itself sleeps: the thread is idle.
            known = TaskClass.KTW
        if known is not None:
            return known, names[sleeper]
    return (
        _wait(names)
        or _BY_SUBSYSTEM.first(names)
        or _BY_WAY.first(names)
        or _call(names)
        or ((TaskClass.KTW, names[-1]) if is_thread else None)
    )


def _wait(names: list[str]) -> tuple[TaskClass, str] | None:
    """Return class and function of the innermost wait; if that is for a disk, of the
    memory reclaim or page fault that it is a part of."""
    found = _BY_WAIT.first(names)
    if found is None:
        return None
    if found[0] is TaskClass.DSK:
        for name in names:
            task_class = _BY_WAIT.get(name)
            if task_class in MEMORY:
                return task_class, name
    if _IS_RT_MUTEX.get(found[1]) is not None:
        # A PI futex is backed by an rt_mutex.
        pi = _IS_PI_FUTEX.first(names)
        if pi is not None:
            return TaskClass.LCK, pi[1]
    return found


def _call(names: list[str]) -> tuple[TaskClass, str] | None:
    for name in names:
        matched = _CALL.fullmatch(name)
        known = _BY_CALL.get(matched[1]) if matched else None
        if known is not None:
            return known, name
    return None
