# SPDX-License-Identifier: LGPL-2.1-or-later

"""The legend of msa-zombies."""

from msatools.legends.model import BOUNDS, STATES, Entry, Group, Legend

COLUMNS = Group(
    "Columns",
    "column",
    (
        Entry("COUNT", "number of zombies"),
        Entry("+/-", "change in the interval"),
        Entry("PARENT", "process that has to reap them"),
        Entry("PARENTS", "processes that have to reap them"),
        Entry("ST", "state of the parent"),
        Entry("AGE", "how long they have been dead", "se.exec_start.", "estimate"),
        Entry("WHY", "why they are not reaped"),
        Entry("LIMITS", "the limit that they are closest to using up"),
        Entry("VERDICT", "why it is not reaped"),
        Entry("ENDED", "exit status, or signal"),
        Entry("PID", "the zombie"),
        Entry("USER", "user of the zombie"),
        Entry("CGROUP", "control group of the zombie"),
        Entry("COMMAND", "name of the zombie: at most 15 bytes"),
        Entry("THREADS", "threads that live on"),
        Entry("TRACER", "process that traces it"),
        Entry("PID NAMESPACE", "inode number of its PID namespace"),
        Entry("STRUCT PID", "address of the struct pid (--leaks)"),
        Entry("REFERENCES", "references that the struct pid counts (--leaks)"),
        Entry("UNNAMED", "references whose holder could not be found (--leaks)"),
    ),
    where="header",
)

VERDICTS = Group(
    "Verdicts",
    "verdict",
    (
        Entry(
            "leader-exited",
            "threads of it live on",
            "Its first thread has ended and others are alive: it cannot be reaped yet.",
        ),
        Entry("being-reaped", "is being reaped", "It will be gone in a moment."),
        Entry(
            "traced",
            "tracer must wait first",
            "A process other than its parent traces it.",
        ),
        Entry(
            "parent-blocked",
            "parent blocked",
            "The parent is in state D: msa-locks shows what it waits for.",
        ),
        Entry(
            "parent-stopped",
            "parent stopped",
            "All its threads are stopped, traced, or frozen by their cgroup.",
        ),
        Entry(
            "reaper-never-reaps",
            "never reaps what it inherits",
            "The parent is the init of a PID namespace or a subreaper, and in no "
            "wait() that would reap it: usually a container whose PID 1 is no init.",
        ),
        Entry(
            "sigchld-blocked",
            "blocks SIGCHLD",
            "SIGCHLD is pending, and all threads block it.",
        ),
        Entry(
            "waiting-for-other",
            "waits for another child",
            "A thread is in wait() for another child or process group.",
        ),
        Entry(
            "clone-child",
            "wait() takes no clone children",
            "Its exit signal is not SIGCHLD, and no wait() has __WALL or __WCLONE.",
        ),
        Entry(
            "handler-missed",
            "SIGCHLD handler left it",
            "There is a handler, and the signals of several children were merged into "
            "one.",
        ),
        Entry(
            "never-waits",
            "never waits for children",
            "SIGCHLD has no handler, and no thread is in wait().",
        ),
        Entry("unknown", "not known"),
    ),
    ("VERDICT", "WHY"),
)

LIMITS = Group(
    "Limits",
    "limit",
    (
        Entry("threads-max", "tasks of the whole system", "kernel.threads-max."),
        Entry("pid_max", "PIDs of a PID namespace", "kernel.pid_max."),
        Entry("pids.max", "tasks of a control group", "The pids controller."),
        Entry("RLIMIT_NPROC", "tasks of a user", "ulimit -u."),
    ),
    ("LIMIT",),
)

LIMIT_COLUMNS = Group(
    "Columns of limits",
    "column",
    (
        Entry("LIMIT", "limit of the number of tasks or PIDs"),
        Entry("OF", "what it limits"),
        Entry("USED", "in use, the dead included"),
        Entry("MAX", "the limit"),
        Entry("LEFT", "free; of pid_max without the PIDs below 300"),
        Entry("DEAD", "zombies that it counts"),
        Entry("%", "part that is in use"),
        Entry("HIT IN", "when it is used up, at the interval's rate"),
    ),
    where="header",
)

LEGEND: Legend = (COLUMNS, VERDICTS, STATES, LIMITS, LIMIT_COLUMNS, BOUNDS)
