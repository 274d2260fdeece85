# SPDX-License-Identifier: LGPL-2.1-or-later

"""The form of a legend, and the names common to outputs of several commands."""

import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Literal

from msgspec import Struct

# --- The form of a legend: groups of entries, each a name, its meaning and its source.


Bound = Literal["exact", "estimate", "upper", "lower", "not kept"]
"""Accuracy of a value: exact; an estimate; an upper or lower bound of the true value;
or not recorded by the kernel."""

_TYPEABLE = re.compile(r"[A-Za-z0-9_./+-]*[A-Za-z0-9_./]")


class Entry(Struct, frozen=True):
    """The meaning of one name in an output."""

    name: str
    """The name, as printed."""

    meaning: str
    """The meaning in a few words, without a full stop."""

    source: str = ""
    """The origin of the value, as sentences; may be empty."""

    bound: Bound = "exact"
    """Accuracy of a column's values, unless it depends on the kernel."""

    key: str = ""
    """Another name of the entry, such as its key in JSON."""

    @property
    def text(self) -> str:
        """The meaning and the source, as sentences."""
        first = self.meaning.split()[0]
        # Names of the kernel or of programs, such as fcntl(), keep their case.
        is_word = first.strip(",:;-").isalpha()
        start = self.meaning[0].upper() if is_word else self.meaning[0]
        return f"{start}{self.meaning[1:]}. {self.source}".rstrip()


class Group(Struct, frozen=True):
    """Names of one kind, such as the classes of tasks."""

    title: str
    """The kind, as a heading: ``States of tasks``."""

    kind: str
    """The kind of one name: ``state of a task``."""

    entries: tuple[Entry, ...]

    columns: tuple[str, ...] = ()
    """Headers of the columns whose cells contain the names; empty if the names are
    headers themselves, or elsewhere."""

    where: Literal["header", "cell", "word", "prefix"] = "cell"
    """Where the names are in an output: headers of columns, cells of :attr:`columns`,
    words of any line, or signs before a value."""


Legend = tuple[Group, ...]


def legend_of(command: str) -> Legend:
    """Return the legend of a command; empty if the command has none."""
    try:
        found: Legend = import_module(f"msatools.legends.{command}").LEGEND
    except ModuleNotFoundError as error:
        if error.name != f"msatools.legends.{command}":
            raise
        return ()
    return found


def find(legend: Legend, name: str) -> list[tuple[Group, Entry]]:
    """Return the entries for a name; ignore case if there is no exact match.

    The header of a column also matches the entries for names in its cells.
    """
    return list(_named(legend, name, str)) or list(_named(legend, name, str.casefold))


def _named(
    legend: Legend, name: str, fold: Callable[[str], str]
) -> Iterator[tuple[Group, Entry]]:
    wanted = fold(name)
    for group in legend:
        is_column = wanted in map(fold, group.columns)
        for entry in group.entries:
            if is_column or wanted in (fold(entry.name), fold(entry.key)):
                yield group, entry


def completable(legend: Legend) -> tuple[str, ...]:
    """Return the names that a shell can complete: one word of plain characters."""
    names = (
        name
        for group in legend
        for entry in group.entries
        for name in (entry.name, entry.key)
        if _TYPEABLE.fullmatch(name)
    )
    return tuple(dict.fromkeys(names))


# --- Names common to the outputs of several commands.


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
