# SPDX-License-Identifier: LGPL-2.1-or-later

"""The legend of msa-report."""

from msatools.legends.model import Entry, Group, Legend

SEVERITIES = Group(
    "Severities",
    "severity",
    (
        Entry("critical", "the machine died of it, or does no work because of it"),
        Entry("warning", "something is wrong, and the machine goes on"),
        Entry("info", "good to know; by itself no fault"),
    ),
    where="word",
)

CONFIDENCE = Group(
    "How sure a verdict is",
    "how sure a verdict is",
    (
        Entry("exact", "the kernel records it; no word is printed for it"),
        Entry("likely", "by a field that may be out of date"),
        Entry(
            "circumstantial",
            "concluded from what tasks do: no record of the kernel says so",
            key="evidence",
        ),
    ),
    where="word",
)

VERDICTS = Group(
    "Verdicts",
    "verdict",
    (
        Entry("panic", "the kernel crashed"),
        Entry("oops", "the kernel had a fault that it survived"),
        Entry(
            "out-of-memory",
            "memory, or a control group's, ran out",
            "From the kernel's log.",
        ),
        Entry(
            "memory-low",
            "little memory is free or available without swapping",
            "Free pages are below the watermark low of all zones, and less than 10 % "
            "of memory is available; critical below 5 %.",
        ),
        Entry(
            "memory-unreclaimable",
            "memory is low and most of it cannot be reclaimed",
            "60 % of memory cannot; or the kernel itself has 40 % of it.",
        ),
        Entry(
            "cgroup-at-limit",
            "a control group is at memory.max",
            "It found nothing to reclaim, or has few file pages.",
        ),
        Entry(
            "memory-leak",
            "a module seems to leak objects",
            "A general slab cache has 5 % of memory, and most of a sample of its "
            "objects point into one module.",
        ),
        Entry("page-tables", "page tables of processes take 5 % of memory"),
        Entry("swap-full", "less than a tenth of swap is free"),
        Entry("memory-poisoned", "pages were taken out of use after memory errors"),
        Entry(
            "dying-cgroups",
            "removed control groups still exist",
            "100 and more, or 5 % of memory is charged to them.",
        ),
        Entry("balloon", "memory is low, and a balloon has a tenth of the guest"),
        Entry(
            "hung-tasks",
            "tasks have been in state D for 10 s or longer",
            "Not those whose cause another verdict names, nor parents in vfork(), as "
            "khungtaskd does not count them either.",
        ),
        Entry("deadlock", "tasks wait for each other; all owners are certain"),
        Entry("possible-deadlock", "the same, and some owner is only likely"),
        Entry("io-stuck", "tasks wait for a device, swap or a server that is silent"),
        Entry("frozen-filesystem", "tasks wait for a frozen file system (fsfreeze)"),
        Entry(
            "stopped-owner",
            "tasks wait for one that is stopped, traced or frozen",
        ),
        Entry("blocked-tasks", "tasks have waited for others for 10 s or longer"),
        Entry("lock-herd", "many threads are woken together for one thing"),
        Entry(
            "priority-inversion",
            "a more urgent task waits for one that gets no CPU",
            "For a second or longer.",
        ),
        Entry(
            "cpu-throttled",
            "tasks wait for one whose CPU quota is used up",
            "Of its control group, or its own as a deadline task.",
        ),
        Entry(
            "cpu-stalled",
            "a CPU has stood still for longer than the kernel allows",
            "For information from 2 s on, if it is less than that.",
        ),
        Entry("cpu-starved", "runnable tasks do not get to run"),
        Entry("rcu-stalled", "an RCU grace period does not end"),
        Entry("cpu-storm", "a CPU is busy with tasklets, timers, packets, one worker"),
        Entry(
            "rcu-backlog",
            "RCU callbacks pile up on a CPU",
            "10,000 and more; a warning if the thread that calls them gets no CPU.",
        ),
        Entry("irq-disabled", "an interrupt that has come before is disabled"),
        Entry("workqueue-stalled", "work is pending and none has begun for 30 s"),
        Entry("irq-imbalance", "one CPU takes most interrupts of devices"),
        Entry("zombies", "a parent does not reap its children"),
        Entry("pids-limit", "nine tenths of a limit of tasks are used"),
        Entry(
            "kernel-memory",
            "the kernel itself holds much that cannot be reclaimed",
            "15 % of memory.",
        ),
        Entry("memory-unattributed", "2 % of memory have no known owner"),
        Entry(
            "counter-unexplained",
            "a counter of the kernel differs from the scan for no known reason",
        ),
        Entry("kernel-warnings", "the kernel warned (WARN())"),
        Entry("device-errors", "errors of hardware, disks or file systems in a log"),
        Entry("dump-damaged", "the dump is cut off, or lists in it are broken"),
    ),
    where="word",
)

LEGEND: Legend = (SEVERITIES, CONFIDENCE, VERDICTS)
