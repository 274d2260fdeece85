# SPDX-License-Identifier: LGPL-2.1-or-later

"""The legend of msa-prstat, and the accuracy of each column on a given kernel."""

from msatools.kernel.clocks import Accounting
from msatools.legends.model import BOUNDS, STATES, Entry, Group, Legend, find
from msatools.prstat.model import Why

_TICKS = (
    "The kernel counts time on the CPU exactly (se.sum_exec_runtime) and lets the tick "
    "sample the mode (utime, stime); shares are those of the ticks, as in ps."
)
_SAMPLED = (
    "Within an interval from samples (-F), each for the time around it; exact where a "
    "wait lasted from sample to sample."
)
_LASTS = "Of a whole life only the wait that lasts is known: > at least that."
_FAULTS = (
    f"{_SAMPLED} {_LASTS} With delay accounting < at most all waits for block I/O and "
    "swap; MAJ has the number of faults."
)
_DELAY = "Of delay accounting, over the task's life: delays->{}."

COLUMNS = Group(
    "Columns",
    "column",
    (
        Entry("PID", "process; with -L the thread", "task_struct.tgid and pid."),
        Entry("TGID", "process that the thread belongs to", "task_struct.tgid."),
        Entry("PPID", "parent process", "real_parent, as in /proc/PID/stat."),
        Entry(
            "USER",
            "real user",
            "real_cred->uid; by name on the machine itself only, as a dump has no "
            "/etc/passwd.",
        ),
        Entry("SIZE", "virtual memory: all mappings", "mm->total_vm, VmSize of /proc."),
        Entry(
            "RSS",
            "resident memory",
            "mm->rss_stat with the parts that CPUs and threads have not passed on: "
            "VmRSS of /proc before v6.16 lacks those.",
        ),
        Entry("STATE", "state, as in /proc", "task_struct.__state and exit_state."),
        Entry(
            "PRI",
            "priority; 20 is nice 0",
            "prio - 100, as the field of /proc/PID/stat.",
        ),
        Entry("NICE", "nice value", "static_prio - 120."),
        Entry("PSR", "CPU that it is on, or was on last", "task_struct.cpu."),
        Entry(
            "TIME",
            "time on the CPU",
            "se.sum_exec_runtime and the turn that lasts; of a process with that of "
            "threads that have ended (signal->sum_sched_runtime).",
        ),
        Entry("CPU", "TIME in percent of one CPU", "Over LIFE, or the interval."),
        Entry("NLWP", "number of threads", "signal->nr_threads."),
        Entry("COMMAND", "name of the task", "task_struct.comm: at most 15 bytes."),
        Entry("PROCESS/NLWP", "COMMAND and NLWP; with -L, COMMAND"),
        Entry("CGROUP", "control group", "Of cgroup v2, as in /proc/PID/cgroup."),
        Entry(
            "NOW",
            "what it is doing, as a class",
            "By its state, and while it sleeps by the kernel functions on its stack; "
            "on a CPU in a dump by the registers.",
        ),
        Entry(
            "FOR",
            "how long it has been in NOW",
            "Since it left the CPU (se.exec_start) or joined the run queue. < is an "
            "upper bound, since it last came to the CPU: when it left is lost. ~ is an "
            "estimate, of zombies: their clock may have lagged.",
        ),
        Entry(
            "ON",
            "what it waits on",
            "By its system call's arguments, its stack, and the kernel's tables. - "
            "where it is not certain.",
        ),
        Entry("USR", "time in user mode, in percent", _TICKS, "estimate"),
        Entry("SYS", "time in the kernel, in percent", _TICKS, "estimate"),
        Entry(
            "LAT",
            "latency: time on a run queue without a CPU, in percent",
            "sched_info.run_delay, and the wait that lasts (last_queued).",
        ),
        Entry(
            "OFF",
            "time off the CPU: asleep, stopped or throttled, in percent",
            "Lifetime less time on the CPU, latency and time as a zombie.",
        ),
        Entry(
            "ZMB", "time since it died, in percent", "Since se.exec_start.", "estimate"
        ),
        Entry(
            "IOW",
            "uninterruptible sleep for I/O, in percent",
            "stats.iowait_sum, and what lasts. > where statistics have not seen all of "
            "OFF (COV); BLK and INT, too.",
        ),
        Entry(
            "BLK",
            "other uninterruptible sleep, in percent",
            "stats.sum_block_runtime - iowait_sum.",
        ),
        Entry(
            "INT",
            "interruptible sleep, in percent",
            "stats.sum_sleep_runtime - sum_block_runtime.",
        ),
        Entry(
            "TFL",
            "page faults on what is mapped executable, in percent",
            _FAULTS,
            "estimate",
        ),
        Entry(
            "DFL",
            "page faults on all else, and swap-ins, in percent",
            _FAULTS,
            "estimate",
        ),
        Entry(
            "LCK",
            "waits for locks in user space (futexes), in percent",
            f"{_SAMPLED} {_LASTS}",
            "estimate",
        ),
        Entry(
            "SLP",
            "all other time off the CPU, in percent",
            "< where part of it is unknown, which may have been locks or faults.",
            "estimate",
        ),
        Entry(
            "STP",
            "stopped, traced or frozen, in percent",
            "What sleeps do not explain. - where statistics do not cover all its life.",
        ),
        Entry("COV", "part of OFF that the statistics of sleeps have seen, in percent"),
        Entry("BIO", "waits for block I/O, in percent", _DELAY.format("blkio_delay")),
        Entry("SWP", "waits for swap-in, in percent", _DELAY.format("swapin_delay")),
        Entry("RCL", "memory reclaim, in percent", _DELAY.format("freepages_delay")),
        Entry("THR", "thrashing, in percent", _DELAY.format("thrashing_delay")),
        Entry("CMP", "memory compaction, in percent", _DELAY.format("compact_delay")),
        Entry("COW", "copy-on-write, in percent", _DELAY.format("wpcopy_delay")),
        Entry("IRQ", "interrupts, in percent", _DELAY.format("irq_delay")),
        Entry("VCX", "voluntary context switches: it went to sleep", "nvcsw."),
        Entry("ICX", "involuntary context switches: it was preempted", "nivcsw."),
        Entry("MIN", "page faults without I/O", "min_flt."),
        Entry("MAJ", "page faults with I/O", "maj_flt."),
        Entry("SCL", "system calls", "Linux does not count them by task.", "not kept"),
        Entry("SIG", "signals received", "Linux does not count them.", "not kept"),
        Entry(
            "TRP",
            "time in traps",
            "Linux does not keep it apart: it is within USR and SYS.",
            "not kept",
        ),
        Entry(
            "OFF-BY",
            "what it waited for in the interval, by class, in percent",
            "From samples: exact where they have it all, else ~ with its standard "
            "error; ? is what no sample has.",
            "estimate",
        ),
        Entry(
            "OFF/VCX",
            "mean time off the CPU per voluntary switch",
            "OFF's time by VCX. Small, with NOW at LCK, is a lock that is passed "
            "around, or a herd.",
        ),
        Entry("LIFE", "time since its start, or of the interval", "start_time."),
        Entry(
            "CUSR",
            "user time of children that were waited for",
            "signal->cutime.",
            "estimate",
        ),
        Entry(
            "CSYS",
            "system time of children that were waited for",
            "signal->cstime.",
            "estimate",
        ),
        Entry("CVCX", "voluntary switches of those children", "signal->cnvcsw."),
        Entry("CICX", "involuntary switches of those children", "signal->cnivcsw."),
        Entry("CMIN", "page faults of those children without I/O", "signal->cmin_flt."),
        Entry("CMAJ", "page faults of those children with I/O", "signal->cmaj_flt."),
    ),
    where="header",
)

_BY_STACK = "By the kernel functions on its stack."
_BY_REGISTERS = "By the registers of its CPU, in a dump."

CLASSES = Group(
    "Classes of what a task is doing",
    "class of task",
    (
        Entry("CPU", "runs", "On a live kernel, where its mode is not known."),
        Entry("USR", "runs in user mode", _BY_REGISTERS),
        Entry("SYS", "runs in the kernel", _BY_REGISTERS),
        Entry("INT", "runs, and its CPU handles an interrupt", _BY_REGISTERS),
        Entry("LAT", "can run, and waits for a CPU", "It is on a run queue."),
        Entry(
            "LCK",
            "waits for a lock in user space (futex)",
            f"{_BY_STACK} Idle threads of a pool wait so, too.",
        ),
        Entry(
            "KLK",
            "waits for a lock of the kernel, or for a thread's work in it",
            f"{_BY_STACK} msa-locks shows who holds it.",
        ),
        Entry("FLK", "waits for a lock on a file", _BY_STACK),
        Entry(
            "POL",
            "waits for events: poll, select, epoll; a halted virtual CPU",
            _BY_STACK,
        ),
        Entry("FLT", "waits in a page fault", _BY_STACK),
        Entry("SWP", "waits for a page from swap", _BY_STACK),
        Entry("RCL", "reclaims memory, or is at its memory cgroup's limit", _BY_STACK),
        Entry(
            "DSK", "waits for a disk, file system (NFS too) or other device", _BY_STACK
        ),
        Entry("PIP", "waits for data of a pipe, or room in it", _BY_STACK),
        Entry("NET", "waits for a socket", _BY_STACK),
        Entry("TMR", "sleeps for a time", _BY_STACK),
        Entry("WAI", "waits for a child or another process", _BY_STACK),
        Entry("SIG", "waits for a signal", _BY_STACK),
        Entry(
            "IPC",
            "waits for a message queue, semaphore (System V, POSIX) or Binder",
            _BY_STACK,
        ),
        Entry("TTY", "waits for a terminal", _BY_STACK),
        Entry("URG", "waits for io_uring", _BY_STACK),
        Entry("KTW", "kernel thread that waits for work", _BY_STACK),
        Entry("STP", "stopped or frozen", "By its state, or its control group's."),
        Entry("TRC", "stopped for its tracer", "By its state."),
        Entry("ZMB", "dead, not reaped", "msa-zombies shows why."),
        Entry("OTH", "something else", "No function on its stack is known to wait."),
        Entry("WAK", "is being woken, and not on a run queue yet", "TASK_WAKING."),
    ),
    ("NOW", "CLASS"),
)

STATES_OF_LIFE = Group(
    "Other tables",
    "column",
    (
        Entry("PID/TID", "process and thread (-L)"),
        Entry("NPROC", "number of processes (-a, -Z, --by)"),
        Entry("MEMORY", "RSS in percent of memory (-a, -Z, --by)"),
        Entry("FOR, SUMMED", "time in the class, of all its threads (--by class)"),
        Entry("LONGEST", "the longest of these times (--by class)"),
        Entry("ERROR", "standard error of TIME, which is from samples (--by class)"),
        Entry("PID NAMESPACE", "inode number of the PID namespace (--by ns)"),
        Entry("FUNCTION", "kernel function that put it to sleep (--load)"),
        Entry("OLDEST", "how long the first of them has done so (--load)"),
        Entry("FROM", "whose timer it is: Gelato or Solaris (--states)"),
        Entry(
            "WHERE IT COMES FROM, OR WHY THERE IS NONE",
            "the kernel's fields, or what the kernel does not keep (--states)",
        ),
    ),
    where="header",
)

LEGEND: Legend = (COLUMNS, CLASSES, STATES, STATES_OF_LIFE, BOUNDS)

_FIELDS = {entry.name: entry for entry in COLUMNS.entries}
FIELDS = tuple(_FIELDS)
"""Names of all columns."""

_SLEEPS = frozenset(("IOW", "BLK", "INT", "STP", "COV"))
_COUNTED = frozenset(("IOW", "BLK", "INT"))
_DELAYS = frozenset(("BIO", "SWP", "RCL", "THR", "CMP", "COW", "IRQ"))


def why(name: str, accounting: Accounting, latency_is_bound: bool) -> Why:
    """
    Describe a column, with the accuracy of its values on a given kernel.

    :raises KeyError: if there is no such column
    """
    field = _FIELDS[name]
    bound, text = field.bound, field.text
    if name == "LAT" and latency_is_bound:
        bound = "upper"
        text += (
            " This kernel lets tasks sleep on the run queue (delayed dequeue, v6.12), "
            "which counts as latency when they wake up."
        )
    elif name in ("OFF", "OFF/VCX") and latency_is_bound:
        bound = "lower"
        text += " As LAT is an upper bound here, this is a lower one."
    elif name in ("USR", "SYS") and accounting.precise_cputime:
        text += " On nohz_full CPUs of this kernel the split is exact."
    elif name in _SLEEPS and not accounting.schedstats:
        bound = "not kept"
        text += (
            " schedstats are off: sysctl kernel.sched_schedstats=1 has them kept from "
            "then on."
        )
    elif name in _COUNTED and latency_is_bound:
        bound = "lower"
        text += (
            " Sleep on the run queue (delayed dequeue, v6.12) is not in it: COV says "
            "how much is."
        )
    elif name in _DELAYS and not accounting.delayacct:
        bound = "not kept"
        text += (
            " Delay accounting is off: sysctl kernel.task_delayacct=1 has it kept for "
            "tasks that start from then on."
        )
    elif name == "IRQ" and not accounting.irq_time:
        bound = "not kept"
        text += " This kernel does not keep time of interrupts apart."
    return Why(name, bound, text)


def explain(name: str, accounting: Accounting, latency_is_bound: bool) -> list[Why]:
    """Describe all entries of the legend for a name, on a given kernel."""
    found = find(LEGEND, name)
    return [
        why(entry.name, accounting, latency_is_bound)
        if group is COLUMNS
        else Why(entry.name, entry.bound, entry.text)
        for group, entry in found
    ]
