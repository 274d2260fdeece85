# SPDX-License-Identifier: LGPL-2.1-or-later

"""The legend of msa-cpus."""

from msatools.legends.model import KEPT, Entry, Group, Legend

COLUMNS = Group(
    "Columns",
    "column",
    (
        Entry("CPU", "number of the CPU"),
        Entry("SET", "cpuset partition or isolation set, else default"),
        Entry("STATE", "states of the CPU"),
        Entry("minf", "page faults without I/O", "PGFAULT - PGMAJFAULT."),
        Entry("mjf", "page faults with I/O", "PGMAJFAULT."),
        Entry(
            "xcal",
            "function calls that other CPUs asked it for",
            "Interrupts for function calls; of x86 and arm64 only.",
        ),
        Entry(
            "tlb",
            "of xcal: TLB flushes",
            "irq_stat.irq_tlb_count; of x86 only.",
        ),
        Entry(
            "intr", "interrupts", "As in /proc/stat, by CPU: of devices and its own."
        ),
        Entry("soft", "softirqs", "kernel_stat.softirqs."),
        Entry("csw", "context switches", "rq.nr_switches."),
        Entry("icsw", "involuntary context switches", "Of tasks that were last on it."),
        Entry("migr", "moves from CPU to CPU", "Of the tasks that are on it now."),
        Entry("smtx", "spins on mutexes", "Linux does not count them.", "not kept"),
        Entry("srw", "spins on rwlocks", "Linux does not count them.", "not kept"),
        Entry("syscl", "system calls", "Linux does not count them.", "not kept"),
        Entry(
            "runq", "runnable tasks now, the one that runs included", "rq.nr_running."
        ),
        Entry("usr", "user mode, in percent", "CPUTIME_USER, NICE; not gst."),
        Entry("nice", "of usr: tasks with a nice value", "CPUTIME_NICE."),
        Entry("sys", "kernel, in percent", "CPUTIME_SYSTEM."),
        Entry("irq", "interrupts and softirqs, in percent", "CPUTIME_IRQ, SOFTIRQ."),
        Entry("softirq", "of irq: softirqs", "CPUTIME_SOFTIRQ."),
        Entry("wt", "idle while a task waited for I/O, in percent", "CPUTIME_IOWAIT."),
        Entry("st", "stolen: the hypervisor ran others, in percent", "CPUTIME_STEAL."),
        Entry("gst", "in guests that it runs, in percent", "CPUTIME_GUEST."),
        Entry("idl", "idle, in percent", "CPUTIME_IDLE."),
        Entry("CURRENT", "the task that it runs now", "rq.curr."),
    ),
    where="header",
)

STATES = Group(
    "States of a CPU",
    "state of a CPU",
    (
        Entry("on", "online, and nothing special"),
        Entry("off", "offline"),
        Entry(
            "no-intr",
            "no device interrupt may go there",
            "Except those of the CPU's own requests to a device.",
        ),
        Entry("isolated", "not used by the scheduler's load balancing"),
        Entry(
            "nohz_full", "no tick while one task runs", "By the kernel's command line."
        ),
        Entry("rcu_nocb", "threads elsewhere run its RCU callbacks"),
        Entry("inactive", "online, but not available to tasks", "It goes offline."),
        Entry("stopped", "runs its stopper thread, as in stop_machine()"),
        Entry("idle", "runs its idle task"),
        Entry("panicked", "the CPU that crashed"),
    ),
    ("STATE",),
)

SETS = Group(
    "Kinds of sets",
    "kind of set",
    (
        Entry("root", "the root cpuset, or a partition of it"),
        Entry("isolated", "a partition without load balancing"),
        Entry("invalid", "a partition that is not in force, with the kernel's reason"),
        Entry("limit", "a cpuset that only limits its tasks"),
        Entry("isolcpus", "by isolcpus= of the command line"),
        Entry("nohz_full", "by nohz_full= of the command line"),
    ),
    ("KIND",),
)

SET_COLUMNS = Group(
    "Columns of sets, --info and -i",
    "column",
    (
        Entry("KIND", "kind of the set"),
        Entry("CPUS", "CPUs of the set"),
        Entry("WHY", "why a partition is not in force"),
        Entry("FROM", "where the set comes from"),
        Entry("IRQS", "device interrupts routed there; may be; managed by the kernel"),
        Entry("NODE", "NUMA node"),
        Entry("SIBLINGS", "CPUs that are threads of the same core"),
        Entry("CAPACITY", "computing power; 1024 is the fastest"),
        Entry("HOTPLUG", "state of its hot plug"),
        Entry("IDLE-STATE", "idle state that it is in"),
        Entry("TICK", "whether its timer tick runs; with --stalls since when"),
        Entry("AFFINITY", "CPUs that the interrupt may go to"),
        Entry("GOES-TO", "CPU that it is routed to"),
        Entry("SHARE", "part of all interrupts of devices"),
        Entry("WHAT", "what the vector is for, as in /proc/interrupts"),
        Entry("CHIP", "interrupt controller"),
        Entry("HANDLER", "function that handles it"),
        Entry("MOST ON", "CPU that has most of them"),
    ),
    where="header",
)

STALLS = Group(
    "Columns of --stalls",
    "column of --stalls",
    (
        Entry("RAN", "how long it has run this task"),
        Entry("WATCHDOG", "how long ago the watchdog ran there"),
        Entry("PREEMPT", "preempt count: 0 if it may switch tasks"),
        Entry("SOFTIRQ", "count of softirqs disabled or in progress"),
        Entry("WAIT", "tasks that wait for the CPU"),
        Entry("DOES", "where its task is"),
        Entry("ASKED-BY", "CPU that asked for the call"),
        Entry("LATE", "how long ago the timer was due"),
    ),
    where="header",
)

FINDINGS = Group(
    "Lines",
    "line",
    (Entry("!", "a problem found; 'do:' below it is a command that may mend it"),),
    where="word",
)

MARKS = Group("Marks", "mark", (KEPT,), where="prefix")

LEGEND: Legend = (COLUMNS, STATES, SETS, SET_COLUMNS, STALLS, FINDINGS, MARKS)
