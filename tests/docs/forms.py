# SPDX-License-Identifier: LGPL-2.1-or-later

"""Forms: the lines that every dump of a scenario prints, however its guest ran.

A page shows what commands printed of one dump: its PIDs, its times, and where a task
happened to sleep. ``forms/SCENARIO.txt`` has the form of what they print in any case. A
form is one line or several that follow each other; blank lines are between forms. Words
are as printed, the space between them is not. ``{KIND}`` stands for any word of a kind
(``KINDS``), ``{KIND as NAME}`` for one that is the same wherever the form says
``{NAME}``, and ``{ONE|ANOTHER}`` for one of those. ``#`` begins a comment.
"""

import re
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

FORMS = Path(__file__).with_name("forms")
OMITTED = "..."
"""The line that stands on a page for lines that it leaves out."""
_APART = ("", OMITTED)

_TIME = r"(?:at most )?[<>~]*(?:\d+[dhm])?\d+(?:\.\d)? ?(?:us|ms|s|m|h)"
_TASKS = r"\d+ [^\s,]+(?:, \d+ [^\s,]+)*(?:, …)?"

KINDS = {
    "n": r"\d[\d,]*",
    "rate": r"<?\d[\d.,]*[KMG]?",
    "share": r"[~<>]?(?:\d+\.\d|100)|-",
    "tid": r"\d+(?:/\d+)?",
    "tick": rf"ok|-|{_TIME}",
    "ages": rf"{_TIME}(?:\.\.{_TIME})?",
    "time": _TIME,
    "clock": r"\d+:\d\d[.:]\d\d(?:\.\d\d)?",
    "pid": r"(?:pid )?\d+",
    "cpus": r"\d[\d,-]*",
    "starves": (
        rf"(?: \([A-Z]+ \d+\)| for {_TIME}|, which is realtime), and \d+ tasks "
        rf"(?:have not run for {_TIME}: pid {_TASKS}|wait, the longest for {_TIME})"
    ),
    "doing": r"(?:user mode|kernel \w+|interrupt \w+)",
    "worker_name": r"u?\d+:\d+H?",
    "short": r"\d[\d.]*[KMGT]",
    "works": r"\(?\w+(?: by \d+\))?(?:, \(?\w+(?: by \d+\))?)*(?: \+\d+)?",
    "size": r"\d[\d.]* [KMGT]iB",
    "hex": r"0x[0-9a-f]+",
    "digits": r"[0-9a-f]+",
    "release": r"\d+\.\d+\.[-+.~\w]+",
    "function": r"[a-z_][\w.]*(?: \[\w+\])?",
    "stack": r"\S+\+0x[0-9a-f]+\??(?: < \S+\+0x[0-9a-f]+\??)*",
    "task": r"[a-z]\S*",
    "branch": r"\|-|`-",
    "states": r"\d[\d,]* [A-Za-z](?:, \d[\d,]* [A-Za-z])*",
    "classes": r"\d[\d,]* [A-Z]{3}(?:, \d[\d,]* [A-Z]{3})*",
    "lab_file": r"/lab/pthreads\+0x[0-9a-f]+",
    "running": r"[^()\s][^()\n]*",
    "day": r"\d{4}-\d\d-\d\d",
    "bar": r"\[#*=*\.*\]",
    "offset": r"0x[0-9a-f]+/0x[0-9a-f]+",
}
"""Kind -> the words that are of it. None is a space or nothing."""

_COMMENT = "# "
_PLACE = re.compile(r"\{([^{}]+)\}")
_SPACE = re.compile(r"\s+")
_LETTERS = re.compile(r"[A-Za-z]")


@dataclass(frozen=True)
class Form:
    """Lines that are printed one after the other."""

    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        known: set[str] = set()
        return re.compile("\n".join(_line(line, known) for line in self.lines), re.M)

    @property
    def wordless(self) -> list[str]:
        """Lines in which no word is as printed: they match what has as many columns."""
        return [s for s in self.lines if not _LETTERS.search(_PLACE.sub("", s))]

    def places(self, text: str) -> Iterator[range]:
        """Yield where a text has the form, as ranges of its lines from 0."""
        for found in self._pattern.finditer(text):
            first = text.count("\n", 0, found.start())
            yield range(first, first + len(self.lines))


def _line(line: str, known: set[str]) -> str:
    """Return the pattern of a line, after one with the names *known*."""
    # The parts at odd indices are places.
    parts = _PLACE.split(line.strip())
    texts = [
        _place(part, known) if index % 2 else _literal(part)
        for index, part in enumerate(parts)
    ]
    return rf"^ *{''.join(texts)} *$"


def _literal(text: str) -> str:
    return " +".join(re.escape(word) for word in _SPACE.split(text))


def _place(text: str, known: set[str]) -> str:
    kind, _, name = text.partition(" as ")
    if kind in known and not name:
        return f"(?P={kind})"
    pattern = KINDS.get(kind)
    if pattern is None:
        if "|" not in kind:
            raise ValueError(f"no kind or name {kind!r}; there are {', '.join(KINDS)}")
        pattern = "|".join(_literal(each) for each in kind.split("|"))
    if not name:
        return f"(?:{pattern})"
    known.add(name)
    return f"(?P<{name}>{pattern})"


def has_forms(scenario: str) -> bool:
    return (FORMS / f"{scenario}.txt").exists()


@cache
def forms_of(scenario: str) -> tuple[Form, ...]:
    """Return the forms of what commands print of a scenario."""
    text = (FORMS / f"{scenario}.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(_COMMENT)]
    parts = re.split(r"\n{2,}", "\n".join(lines).strip("\n"))
    return tuple(Form(tuple(part.splitlines())) for part in parts)


@dataclass(frozen=True)
class Formed:
    """A text, and where it has the forms of a scenario."""

    text: str
    scenario: str

    @cached_property
    def places(self) -> dict[Form, list[range]]:
        """The forms that it has -> their places in it."""
        found = {form: [*form.places(self.text)] for form in forms_of(self.scenario)}
        return {form: places for form, places in found.items() if places}

    def lines_of(self, count: int) -> list[str]:
        """Return the lines that belong to *count* forms, but those left out."""
        numbers = [n for places in self.places.values() for at in places for n in at]
        return [
            line
            for number, line in enumerate(self.text.splitlines())
            if line not in ("", OMITTED) and numbers.count(number) == count
        ]

    def lacks(self, shown: "Formed") -> list[Form]:
        """Return the forms that a page shows more often than this text has them."""
        return [
            form
            for form, places in shown.places.items()
            if len(places) > len(self.places.get(form, ()))
        ]

    def renewed(self, printed: "Formed") -> str | None:
        """Return this text with its forms as they are in another one.

        The first place of a form is replaced by the other's first, and so on. Between
        lines that are left out, forms get the other's order.

        :return: None if the other text lacks forms, or has them in another order
        """
        if printed.lacks(self):
            return None
        lines = self.text.splitlines(keepends=True)
        others = printed.text.splitlines(keepends=True)
        marks = [number for number, line in enumerate(lines) if line.strip() in _APART]
        parts: dict[int, list[range]] = {}
        for form, places in self.places.items():
            for here, there in zip(places, printed.places[form], strict=False):
                parts.setdefault(bisect(marks, here.start), []).append(there)
        ordered = [sorted(parts.get(n, ()), key=_start) for n in range(len(marks) + 1)]
        starts = [place.start for part in ordered for place in part]
        if starts != sorted(starts):
            return None
        text = ""
        for part, mark in zip(ordered, (*marks, None), strict=True):
            text += "".join(others[n] for place in part for n in place)
            text += lines[mark] if mark is not None else ""
        return text


def _start(place: range) -> int:
    return place.start
