# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the marks, codes and columns of the reports mean, each in a line.

The columns of msa-prstat are described in :mod:`msatools.prstat.column_docs`, which
knows their bounds on one kernel. Pure.
"""

from collections.abc import Mapping

SEVERITIES: Mapping[str, str] = {
    "critical": "the machine died of it, or does no work because of it",
    "warning": "something is wrong, and the machine goes on",
    "info": "worth knowing; nothing has to be done",
}
DOUBTS: Mapping[str, str] = {
    "likely": "known by a hint of the kernel that may be out of date",
    "circumstantial": "concluded from what tasks do: no record of the kernel says so",
}
"""How sure a verdict is, if the kernel does not record what it says."""

TASK_STATES: Mapping[str, str] = {
    "R": "running, or ready to run",
    "S": "asleep; a signal wakes it",
    "D": "uninterruptible sleep: no signal wakes it, not even kill -9",
    "T": "stopped by a signal",
    "t": "stopped by its tracer",
    "Z": "zombie: dead, and not reaped by its parent",
    "X": "dead",
    "I": "idle kernel thread",
    "P": "parked kernel thread",
}
TASK_CLASSES: Mapping[str, str] = {
    "CPU": "runs; on a live kernel it is not known in which mode",
    "USR": "runs in user mode",
    "SYS": "runs in the kernel",
    "INT": "its CPU handles an interrupt",
    "LAT": "waits for a CPU",
    "LCK": "waits for a futex: a lock or condition of a program",
    "KLK": "waits for a lock of the kernel, or for another task's work in it",
    "FLK": "waits for a lock on a file",
    "POL": "waits for events: poll, select, epoll; or is a halted virtual CPU",
    "FLT": "waits for a page fault to be served",
    "SWP": "waits for a page from swap",
    "RCL": "waits for memory to be reclaimed",
    "DSK": "waits for a disk, a file system or another device",
    "PIP": "waits for a pipe or a file like a pipe",
    "NET": "waits for a socket",
    "TMR": "waits for time to pass",
    "WAI": "waits for another process",
    "SIG": "waits for a signal",
    "IPC": "waits for a message queue, a semaphore or Binder",
    "TTY": "waits for a terminal",
    "URG": "waits for io_uring",
    "KTW": "kernel thread that waits for work",
    "STP": "stopped or frozen",
    "TRC": "stopped by its tracer",
    "ZMB": "dead, not reaped yet",
    "OTH": "does something else",
    "WAK": "is being woken, and not on a run queue yet",
}
"""What a task does now: the names of :class:`msatools.tasks.classes.TaskClass`."""

VALUE_MARKS: Mapping[str, str] = {
    "~": "an estimate",
    "<": "at most: an upper bound",
    ">": "at least: a lower bound",
    "-": "not kept by Linux, or unknown",
}
"""Marks before, or instead of, a value."""

OWNER_MARKS: Mapping[str, str] = {
    "=": "this task has the lock: the lock itself records it",
    "~": "this task is likely to have the lock, by a record that may be out of date",
    "?": "this task may have the lock: its stack contains the lock's address",
    "-": "no owner is known",
}
"""Marks before the owner of a lock."""

LOCK_WORDS: Mapping[str, str] = {
    "ROOT": "the end of a chain of waits: what all tasks below it wait for",
    "blocks": "how many tasks wait for it, directly or behind others; (N D): of these "
    "in uninterruptible sleep",
    "R": "waits to read, or to share the lock",
    "W": "waits to write, or to have the lock alone",
    "DEADLOCK": "tasks that wait for each other, for ever; POSSIBLE: if the owners "
    "marked ~ or ? are right",
    "HERD": "many tasks that wait for one thing and are woken together",
    "INVERSION": "an urgent task waits for a less urgent one that gets no CPU",
    "UNOWNED": "waits for locks that have no known owner: usually idle threads",
    "OTHERS": "blocked tasks that are behind no root",
}
CPU_STATES: Mapping[str, str] = {
    "on": "online",
    "off": "offline",
    "panicked": "ran panic()",
    "stopped": "stopped, as by stop_machine()",
    "inactive": "online, and not available to tasks",
    "isolated": "left out by the scheduler's load balancing",
    "nohz_full": "without a tick while one task runs",
    "rcu_nocb": "RCU callbacks run on other CPUs",
    "no-intr": "no device interrupt is allowed there",
    "idle": "runs its idle task",
}
CPU_COLUMNS: Mapping[str, str] = {
    "CPU": "number of the CPU",
    "SET": "cpuset partition or isolation set that the CPU is in",
    "STATE": "state of the CPU",
    "minf": "page faults without I/O",
    "mjf": "page faults with I/O",
    "xcal": "function calls that other CPUs asked it for",
    "tlb": "TLB flushes that other CPUs asked it for",
    "intr": "interrupts",
    "soft": "softirqs",
    "csw": "context switches",
    "icsw": "involuntary context switches",
    "migr": "tasks that came from another CPU",
    "runq": "tasks on its run queue now",
    "usr": "% of its time in user mode",
    "nice": "% of its time in user mode, of niced tasks",
    "sys": "% of its time in the kernel",
    "irq": "% of its time in interrupts and softirqs",
    "softirq": "% of its time in softirqs",
    "wt": "% of its time idle while a task waited for I/O",
    "st": "% of its time taken by the hypervisor (stolen)",
    "gst": "% of its time running guests",
    "idl": "% of its time idle",
    "CURRENT": "task that it runs",
    "CPUS": "CPUs of the set",
    "KIND": "kind of the set; invalid: requested, and not in force",
    "FROM": "what makes the set",
    "IRQS": "device interrupts routed to, or allowed on, a CPU of the set",
    "WHY": "why the set is not in force",
}
"""Counts and shares are since boot."""

MEMORY_COLUMNS: Mapping[str, str] = {
    "CLASS": "what the pages are used for; indented classes add up to the one above",
    "PAGES": "pages, counted one by one in the memmap",
    "SIZE": "the same in bytes",
    "%RAM": "share of the pages that the kernel manages",
    "KERNEL SAYS": "the kernel's own counter that the count is checked against",
    "DIFF": "count less counter; ok: equal; otherwise the reason",
    "UNEXPLAINED": "the count and the kernel's counter differ for no known reason",
}
MEMORY_CLASSES: Mapping[str, str] = {
    "free.buddy": "free, in the buddy allocator",
    "free.pcp": "free, in lists of each CPU",
    "free.hugetlb": "reserved for hugetlb, and not in use",
    "free.unaccepted": "not accepted from the hypervisor yet",
    "user.anon": "memory of processes, with its swap cache",
    "user.ksm": "pages of processes that were merged, as they are equal",
    "user.hugetlb": "hugetlb pages in use",
    "cache.file": "page cache of files",
    "cache.exec": "page cache of files that a process maps to execute",
    "cache.shmem": "tmpfs, shared anonymous and System V memory, memfd",
    "cache.blockdev": "page cache of block devices: file system metadata, raw reads",
    "kernel.slab": "slab caches of the kernel's objects",
    "kernel.large_kmalloc": "kmalloc() above two pages",
    "kernel.page_tables": "page tables of processes that the kernel counts",
    "kernel.page_tables_own": "the kernel's page tables, and top levels of processes'",
    "kernel.stacks": "kernel stacks, with those kept for the next fork",
    "kernel.vmalloc": "vmalloc(), without stacks",
    "kernel.percpu": "chunks of the percpu allocator",
    "kernel.pipes": "data in pipes",
    "kernel.sockets": "data queued in sockets",
    "kernel.memmap": "struct pages of memory that was plugged in",
    "kernel.huge_zero": "the huge page of zeros",
    "kernel.zsmalloc": "compressed memory of zram and zswap",
    "kernel.movable": "other movable pages of drivers",
    "kernel.unattributed": "in use, and by whom is unknown: usually drivers",
    "reserved": "the kernel's image, the memmap, firmware, holes",
    "offline": "given back to the hypervisor",
    "hwpoison": "taken out of use after hardware errors",
    "device": "memory of devices",
    "excluded": "left out when the dump was made",
    "unreadable": "the struct page could not be read",
}
ZOMBIE_COLUMNS: Mapping[str, str] = {
    "COUNT": "zombies of one parent, for one reason",
    "PARENT": "process that has to reap them",
    "ST": "state of the parent",
    "AGE": "for how long they have been dead",
    "WHY": "why they are not reaped",
    "LIMITS": "the limit that they are closest to using up",
    "PID": "the zombie",
    "VERDICT": "the reason, as --verdict names it",
    "ENDED": "exit status or signal",
    "USER": "user of the zombie",
    "THREADS": "its threads that have not been reaped",
    "TRACER": "process that traces it",
    "PID NAMESPACE": "its PID namespace (and its PID there)",
    "CGROUP": "its control group",
    "COMMAND": "its name",
    "LIMIT": "a limit that zombies count against",
    "OF": "what the limit applies to",
    "USED": "tasks that count against it, dead ones too",
    "MAX": "the limit",
    "LEFT": "how many more are possible",
    "DEAD": "zombies among them",
    "%": "share of the limit that is used",
}
