# SPDX-License-Identifier: LGPL-2.1-or-later

"""Names that the outputs of several commands have."""

from msatools.legends.model import Entry, Group

STATES = Group(
    "States of tasks",
    "state of a task",
    (
        Entry("R", "runs, or waits for a CPU", "TASK_RUNNING of task_struct.__state."),
        Entry(
            "S",
            "sleeps; a signal wakes it",
            "TASK_INTERRUPTIBLE: usually waits for work, data or time.",
        ),
        Entry(
            "D",
            "uninterruptible sleep: nothing but what it waits for ends it",
            "TASK_UNINTERRUPTIBLE: usually I/O or a lock of the kernel. kill -9 works "
            "only if TASK_KILLABLE. Counts in the load average.",
        ),
        Entry("T", "stopped by a signal, such as SIGSTOP", "__TASK_STOPPED."),
        Entry("t", "stopped by its tracer, such as a debugger", "__TASK_TRACED."),
        Entry(
            "Z",
            "zombie: it has ended, and its parent has not reaped it",
            "EXIT_ZOMBIE of task_struct.exit_state.",
        ),
        Entry("X", "is being removed", "EXIT_DEAD of task_struct.exit_state."),
        Entry(
            "I",
            "kernel thread without work",
            "TASK_IDLE: as D, but not counted in the load average.",
        ),
        Entry("P", "parked kernel thread", "TASK_PARKED: its CPU is offline."),
    ),
    ("STATE", "ST"),
)

KEPT = Entry("-", "not recorded by the kernel, or it could not be read")

BOUNDS = Group(
    "Marks before a value",
    "mark before a value",
    (
        Entry("~", "estimate"),
        Entry("<", "at most so much"),
        Entry(">", "at least so much"),
        KEPT,
    ),
    where="prefix",
)

OWNERS = Group(
    "Marks before an owner",
    "mark before an owner",
    (
        Entry(
            "=",
            "certain: the lock records this owner",
            "A field of the lock that is right whenever it is set; the task lives, is "
            "older than the wait, and can hold a kernel lock where it is.",
            key="exact",
        ),
        Entry(
            "~",
            "likely: recorded in a field that may be out of date",
            "The last reader of an rwsem, the owner recorded by the C library, or "
            "where the task is, such as in a page fault of the memory whose lock it "
            "is.",
            bound="estimate",
            key="likely",
        ),
        Entry(
            "?",
            "a guess: the lock's address is on this task's stack",
            "Below a function that takes such locks, although the task does not wait "
            "for it.",
            bound="estimate",
            key="evidence",
        ),
    ),
    where="word",
)
