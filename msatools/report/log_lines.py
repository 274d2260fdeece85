# SPDX-License-Identifier: LGPL-2.1-or-later

"""The last lines of the kernel's log that matter. Pure."""

import re
from collections.abc import Iterable, Iterator, Sequence

from msatools.report.frames import parse_frame
from msatools.target.printk import LogRecord

LINES = 20

_WARNING = 4
"""KERN_WARNING: what matters is at least that."""

_NOISE = re.compile(
    r"(R[A-Z0-9]{1,2}|E[A-Z]{2}|CR\d|DR\d|[CDEFGS]S|PKRU|EFLAGS|x\d+|pstate|sp|lr)"
    r" ?: ?|"
    r"(RSP|RIP): 00|Code: |</?[A-Z #\w]+>$|Call [Tt]race:|Modules linked in:|"
    r"Hardware name: |Kernel Offset:|Tainted: \[|\[ *\d+\] +\d+ +\d+ |#PF: |PGD |"
    r"---\[ |-+\[ cut here|CPU: \d+ |NMI backtrace for|Sending NMI|"
    r"Node \d+ |lowmem_reserve|\d+ (total )?(pages|pagecache) |(Free|Total) swap|"
    r"active_anon:|"
    r"[a-z_]+:\d+ [a-z_]+:\d+|kernel_misc_reclaimable|Tasks state |Mem-Info:|"
    r"[a-z_]+ \d+$|>?[A-Z] +\S+ +\d+ +[\d.]+ +\d+ +\d+ |"
    # Tables of the scheduler (kernel/sched/debug.c), of workqueues and of timers, which
    # sysrq and some watchdogs print.
    r">?[A-Z] .{1,16} +\d+ +-?\d+\.\d+ |S +task +PID|runnable tasks:|-{20}|"
    r"(cfs|rt|dl)_rq\[|cpu#\d+|\.\w+ +: |Sched Debug Version|sysctl_sched|ktime +:|"
    r"sched_clk +:|cpu_clk +:|jiffies +:|task:.{1,16} state:|"
    r"Showing (busy|all)|workqueue \S+: flags|pwq \d+: |pool \d+: |"
    r"(in-flight|pending|inactive|delayed|idle): |"
    # Said by each boot, or each mount.
    r"device-mapper: core: CONFIG_IMA|\S+: loading out-of-tree module|"
    r".*supports timestamps until"
)
"""Registers and the like, which a crash has elsewhere in the report, and tables that
would fill the page."""

_OF_PROGRAM = "(by a program) "
"""Marks what was written to /dev/kmsg, which may claim anything."""

_BOOT_NS = 30_000_000_000
"""What a boot warns of is the same each time."""


def last_lines(log: Sequence[LogRecord]) -> tuple[str, ...]:
    """Return the last :data:`LINES` lines that matter, as dmesg prints them.

    Of lines that are repeated only the last is kept, with how often there were such.
    """
    last_ns = log[-1].time_ns if log else 0
    times: dict[str, int] = {}
    lines: list[tuple[str, str]] = []
    for record in reversed(log):
        if record.level > _WARNING:
            continue
        if record.time_ns < min(_BOOT_NS, last_ns // 2) or len(lines) >= LINES:
            break
        for line in reversed(_lines(record)):
            if _is_noise(line):
                continue
            text = line.partition("] ")[2]
            if text not in times:
                lines.append((line, text))
            times[text] = times.get(text, 0) + 1
    return tuple(
        line if times[text] == 1 else f"{line} ({times[text]} times)"
        for line, text in reversed(lines[:LINES])
    )


def all_lines(log: Iterable[LogRecord]) -> Iterator[str]:
    """Yield all lines of a log, as dmesg prints them."""
    for record in log:
        yield from _lines(record)


def _lines(record: LogRecord) -> list[str]:
    stamp = _stamp(record.time_ns)
    writer = "" if record.is_kernel else _OF_PROGRAM
    lines = record.text.expandtabs().split("\n")
    return [f"{stamp} {writer}{line}" for line in lines]


def _is_noise(line: str) -> bool:
    text = line.partition("] ")[2].strip()
    frame = parse_frame(text.removeprefix("? "))
    return not text or frame is not None or bool(_NOISE.match(text))


def _stamp(time_ns: int) -> str:
    seconds, rest = divmod(time_ns // 1000, 1_000_000)
    return f"[{seconds:5}.{rest:06}]"
