# SPDX-License-Identifier: LGPL-2.1-or-later

"""The legend of msa-locks."""

from msatools.legends.model import BOUNDS, OWNERS, STATES, Entry, Group, Legend
from msatools.legends.prstat import CLASSES

LINES = Group(
    "Kinds of lines",
    "line",
    (
        Entry(
            "ROOT",
            "the end of a chain of waits: who or what all below wait for",
            "A task that waits for nobody, a device or server, or tasks that wait for "
            "each other. Sorted by what they block: a task in D counts as ten in S.",
        ),
        Entry(
            "DEADLOCK",
            "tasks that wait for each other; all owners are certain",
            "POSSIBLE DEADLOCK: an owner among them is only likely.",
        ),
        Entry("HERD", "a lock with 16 or more waiters that are woken together"),
        Entry(
            "INVERSION",
            "an owner that gets no CPU keeps a more urgent task waiting",
            "One of a higher scheduling class or real-time priority.",
        ),
        Entry(
            "NO KNOWN OWNER",
            "waits for locks whose holder could not be found",
            "Futexes and wait queues without a waiter in D: usually idle threads.",
        ),
        Entry("perhaps", "a guess: only its stack says that this task has the lock"),
        Entry("OTHERS", "blocked tasks that no root explains, and nobody waits for"),
    ),
    where="word",
)

MODES = Group(
    "Before a waiter",
    "mark before a waiter",
    (
        Entry("R", "waits to read (shared)", key="read"),
        Entry("W", "waits to write (exclusive)", key="write"),
    ),
    ("MODE",),
    where="word",
)

TYPES = Group(
    "Types of locks",
    "type of lock",
    (
        Entry("mutex", "sleeping lock of the kernel", "struct mutex: owner is exact."),
        Entry("ww_mutex", "mutex that backs off from deadlocks", "struct ww_mutex."),
        Entry(
            "rwsem",
            "readers or one writer",
            "struct rw_semaphore; of readers only the last may be known.",
        ),
        Entry("semaphore", "counting semaphore", "It records no owner."),
        Entry("rt_mutex", "mutex that lends its waiters' priority", "struct rt_mutex."),
        Entry(
            "percpu_rwsem",
            "readers per CPU, or one writer",
            "Such as a frozen file system's. Readers are only counted.",
        ),
        Entry("spinlock", "lock that waiters spin for", "On PREEMPT_RT they sleep."),
        Entry(
            "futex",
            "lock or condition of a program",
            "The kernel records no owner; the C library's own word may.",
        ),
        Entry(
            "pi_futex", "futex with priority inheritance", "The kernel has the owner."
        ),
        Entry("completion", "wait until another task says that something is done"),
        Entry("folio", "pages of a file: until they are read, written or unlocked"),
        Entry("bit_wait", "wait for a bit of a word, such as an inode's state"),
        Entry("wait_queue", "wait until a condition holds"),
        Entry("posix_lock", "lock on a range of a file: fcntl()"),
        Entry("flock", "lock on a file: flock()"),
        Entry("vma", "lock of one mapping of a process", "Since v6.4."),
        Entry("srcu", "wait for readers of sleepable RCU"),
        Entry("rcuwait", "wait of one task, such as for a CPU to be empty"),
        Entry("threads", "waits for its own threads: exec, exit, core dump"),
        Entry("child", "waits for a child: wait(), vfork()"),
        Entry("io_uring", "waits for requests of io_uring"),
        Entry("epoll", "waits for events of files: epoll"),
        Entry("poll", "waits for events of files: poll, select"),
        Entry("pipe", "waits for data of a pipe, or room in it"),
        Entry("buffer", "lock of a file system's buffer, such as xfs_buf"),
    ),
)

COLUMNS = Group(
    "Columns of --by, --chains and --holders",
    "column",
    (
        Entry("WAITERS", "tasks that wait for the lock"),
        Entry(
            "OLDEST", "how long the first of them, or the oldest request, has waited"
        ),
        Entry("LOCK", "type and name, or address, of the lock"),
        Entry("READERS", "number of readers that hold it"),
        Entry("OWNERS", "tasks that hold it, with the mark of how it is known"),
        Entry("WAITING", "PIDs of the waiters"),
        Entry("PID/TID", "process and thread"),
        Entry("FOR", "how long it has waited"),
        Entry("MODE", "read or write"),
        Entry("WAITS FOR", "the lock or event that it waits for"),
        Entry("IN", "function that takes the lock, and system call"),
        Entry("LOCKS", "number of locks that it holds"),
        Entry("DIRECT", "tasks that wait for its locks"),
        Entry("ALL", "tasks that wait for it in the end"),
        Entry("HAS", "the locks that it holds"),
        Entry("DOES", "where it is now"),
        Entry("WAITED", "share of samples in which tasks waited (with INTERVAL)"),
        Entry("MEAN", "mean number of waiters in a sample"),
        Entry("MAX", "most waiters in a sample"),
        Entry("WAIT/S", "how long tasks waited per second, with its standard error"),
    ),
    where="header",
)

IO_COLUMNS = Group(
    "Columns of --io",
    "column of --io",
    (
        Entry("READS", "reads in flight"),
        Entry("WRITES", "writes in flight"),
        Entry("HELD", "requests that the disk holds back itself"),
        Entry("NO COMPLETION", "how long the disk has completed nothing"),
        Entry("SCHEDULER", "I/O scheduler"),
        Entry("DEPTH", "most requests that it takes at a time"),
        Entry("BELOW", "the disks that it is stacked on"),
        Entry("STAGE", "where a request is: scheduler, dispatch, driver"),
        Entry("TAG", "number of the request's slot"),
    ),
    where="header",
)

WORK_COLUMNS = Group(
    "Columns of --workqueues",
    "column of --workqueues",
    (
        Entry("POOL", "number of the pool of workers"),
        Entry("PENDING", "work that has not begun"),
        Entry("LAST BEGUN", "how long ago a worker began work"),
        Entry("WORKERS", "threads of the pool"),
        Entry("IDLE", "workers without work"),
        Entry("RUN", "workers that run or could"),
        Entry("PENDING BECAUSE", "why the work has not begun"),
        Entry("MAX ACTIVE", "most work of the queue at a time"),
        Entry("RESCUER", "thread that does the work if memory is short"),
        Entry("MAYDAYS", "pools that wait for the rescuer"),
    ),
    where="header",
)

LEGEND: Legend = (
    *(LINES, MODES, OWNERS, STATES, CLASSES),
    *(TYPES, COLUMNS, IO_COLUMNS, WORK_COLUMNS, BOUNDS),
)
