# SPDX-License-Identifier: LGPL-2.1-or-later

"""Describes each column: its meaning, its source in the kernel, and its bound."""

from collections.abc import Mapping

from msatools.kernel.accounting import Accounting
from msatools.prstat.model import Why
from msatools.records import dataclass

_TICKS = (
    "The kernel counts time on the CPU exactly (se.sum_exec_runtime) and lets the tick "
    "sample the mode (utime, stime); shares are those of the ticks, as in ps."
)
_LATENCY = (
    "Time on a run queue without the CPU: sched_info.run_delay, and the wait that "
    "lasts (last_queued)."
)
_SAMPLED = (
    "what looks within an interval met (-F), each for the time around it; exact where "
    "a wait lasted from look to look."
)
_LASTS = "Of a whole life just the wait that lasts is known: > at least that."
_FAULTS = (
    f"{_LASTS} With delay accounting on < at most all waits for block I/O and swap; "
    "MAJ has the number of faults."
)
_OFF = (
    "Lifetime less time on the CPU, latency and time as a zombie: asleep, stopped, or "
    "throttled."
)


@dataclass(frozen=True)
class _ColumnDoc:
    bound: str
    text: str


_FIELDS: Mapping[str, _ColumnDoc] = {
    "PID": _ColumnDoc("exact", "The process; with -L the thread (task_struct.pid)."),
    "TGID": _ColumnDoc(
        "exact", "The process that the thread is of (task_struct.tgid)."
    ),
    "PPID": _ColumnDoc("exact", "The parent process (real_parent), as /proc/PID/stat."),
    "USER": _ColumnDoc(
        "exact",
        "The real user (real_cred->uid); by name on the machine itself only, as a dump "
        "has no /etc/passwd.",
    ),
    "SIZE": _ColumnDoc("exact", "All mappings (mm->total_vm), as VmSize."),
    "RSS": _ColumnDoc(
        "exact",
        "Resident pages (mm->rss_stat) with the parts that CPUs and threads have not "
        "passed on: VmRSS of /proc before v6.16 lacks those.",
    ),
    "STATE": _ColumnDoc("exact", "As in /proc (__state, exit_state)."),
    "PRI": _ColumnDoc("exact", "As in /proc/PID/stat (prio - 100); 20 is nice 0."),
    "NICE": _ColumnDoc("exact", "static_prio - 120."),
    "PSR": _ColumnDoc("exact", "The CPU that it is on, or was on last."),
    "TIME": _ColumnDoc(
        "exact",
        "Time on the CPU (se.sum_exec_runtime, and the burst that lasts), of a process "
        "with that of threads that have ended (signal->sum_sched_runtime).",
    ),
    "CPU": _ColumnDoc(
        "exact", "TIME as a share of one CPU, over LIFE or the interval."
    ),
    "NLWP": _ColumnDoc("exact", "Threads of the process (signal->nr_threads)."),
    "COMMAND": _ColumnDoc("exact", "task_struct.comm: at most 15 bytes."),
    "PROCESS/NLWP": _ColumnDoc("exact", "COMMAND and NLWP; with -L, COMMAND."),
    "CGROUP": _ColumnDoc(
        "exact", "The control group of cgroup v2, as /proc/PID/cgroup."
    ),
    "NOW": _ColumnDoc(
        "exact",
        "What it is doing: by its state, and while it sleeps by the kernel functions "
        "on its stack; on a CPU in a dump by the registers.",
    ),
    "FOR": _ColumnDoc(
        "exact",
        "How long it has been in NOW: since it left the CPU (se.exec_start) or joined "
        "the run queue. <: that time is lost, and this one, since it last came to a "
        "CPU, is an upper bound; ~ of zombies, by a clock that may have lagged.",
    ),
    "ON": _ColumnDoc(
        "exact",
        "What it waits on, by its system call's arguments, its stack, and the kernel's "
        "tables. - where it is not certain.",
    ),
    "USR": _ColumnDoc("estimate", f"Time in user mode. {_TICKS}"),
    "SYS": _ColumnDoc("estimate", f"Time in the kernel. {_TICKS}"),
    "LAT": _ColumnDoc("exact", _LATENCY),
    "OFF": _ColumnDoc("exact", _OFF),
    "ZMB": _ColumnDoc("estimate", "Time since it died (exec_start)."),
    "IOW": _ColumnDoc(
        "exact",
        "Uninterruptible sleep for I/O (stats.iowait_sum), and what lasts. > where "
        "statistics have not seen all of OFF (COV); BLK and INT, too.",
    ),
    "BLK": _ColumnDoc(
        "exact", "Other uninterruptible sleep (stats.sum_block_runtime - iowait_sum)."
    ),
    "INT": _ColumnDoc(
        "exact", "Interruptible sleep (stats.sum_sleep_runtime - sum_block_runtime)."
    ),
    "TFL": _ColumnDoc(
        "estimate",
        f"Page faults on what is mapped executable: {_SAMPLED} {_FAULTS}",
    ),
    "DFL": _ColumnDoc(
        "estimate", f"Page faults on all else, and swap-ins: {_SAMPLED} {_FAULTS}"
    ),
    "LCK": _ColumnDoc(
        "estimate", f"Locks in user space, which are futexes: {_SAMPLED} {_LASTS}"
    ),
    "SLP": _ColumnDoc(
        "estimate",
        "All other time off the CPU. < where part of it is unknown, which may have "
        "been locks or faults.",
    ),
    "STP": _ColumnDoc(
        "exact",
        "Stopped, traced or frozen: what sleeps do not explain. - where statistics do "
        "not cover the whole life.",
    ),
    "COV": _ColumnDoc(
        "exact", "The share of OFF that the statistics of sleeps have seen."
    ),
    "BIO": _ColumnDoc("exact", "Delay by block I/O (delays->blkio_delay)."),
    "SWP": _ColumnDoc("exact", "Delay by swap-in (delays->swapin_delay)."),
    "RCL": _ColumnDoc("exact", "Delay by reclaim (delays->freepages_delay)."),
    "THR": _ColumnDoc("exact", "Delay by thrashing (delays->thrashing_delay)."),
    "CMP": _ColumnDoc("exact", "Delay by compaction (delays->compact_delay)."),
    "COW": _ColumnDoc("exact", "Delay by copy-on-write (delays->wpcopy_delay)."),
    "IRQ": _ColumnDoc("exact", "Delay by interrupts (delays->irq_delay)."),
    "VCX": _ColumnDoc("exact", "Voluntary context switches (nvcsw)."),
    "ICX": _ColumnDoc("exact", "Involuntary context switches (nivcsw)."),
    "MIN": _ColumnDoc("exact", "Page faults without I/O (min_flt)."),
    "MAJ": _ColumnDoc("exact", "Page faults with I/O (maj_flt)."),
    "SCL": _ColumnDoc("not kept", "Linux does not count system calls by task."),
    "SIG": _ColumnDoc("not kept", "Linux does not count signals received."),
    "TRP": _ColumnDoc(
        "not kept", "Linux keeps no time in traps: it is within USR and SYS."
    ),
    "OFF-BY": _ColumnDoc(
        "estimate",
        "What it waited for within an interval, by class, as shares of it: exact where "
        "samples have it all, else ~ with its standard error; ? is what no sample has.",
    ),
    "OFF/VCX": _ColumnDoc(
        "exact",
        "Mean time off the CPU per voluntary switch: OFF's time by VCX. Small, with "
        "NOW at LCK, is a lock that is passed around, or a herd.",
    ),
    "LIFE": _ColumnDoc(
        "exact", "Time since the start (start_time), or of the interval."
    ),
    "CUSR": _ColumnDoc(
        "estimate", "User time of children that were waited for (signal->cutime)."
    ),
    "CSYS": _ColumnDoc("estimate", "System time of those children (signal->cstime)."),
    "CVCX": _ColumnDoc(
        "exact", "Voluntary switches of those children (signal->cnvcsw)."
    ),
    "CICX": _ColumnDoc("exact", "Involuntary ones (signal->cnivcsw)."),
    "CMIN": _ColumnDoc("exact", "Page faults of those children without I/O."),
    "CMAJ": _ColumnDoc("exact", "Page faults of those children with I/O."),
}

FIELDS = tuple(_FIELDS)
"""Names of all columns."""

_SLEEPS = frozenset(("IOW", "BLK", "INT", "STP", "COV"))
_COUNTED = frozenset(("IOW", "BLK", "INT"))
_DELAYS = frozenset(("BIO", "SWP", "RCL", "THR", "CMP", "COW", "IRQ"))


def why(name: str, accounting: Accounting, latency_is_bound: bool) -> Why:
    """
    Describe a column, with the bound that it has on one kernel.

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
