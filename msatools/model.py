# SPDX-License-Identifier: LGPL-2.1-or-later

"""Models: their fields, JSON keys and marks, and the base class of all reports.

A model is a :class:`msgspec.Struct`. Marks beside a field's type decide how JSON shows
the field::

    cost: Annotated[Cost | None, ADDED] = None
"""

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct
from msgspec.structs import asdict

if TYPE_CHECKING:
    from rich.console import Group

# --- Fields of models: their keys in JSON, and their marks.


class Mark(Struct, frozen=True):
    """A mark of a field, within ``Annotated``."""

    name: str
    value: Hashable = True


def names(model: Any) -> tuple[str, ...]:
    """Return the names of the fields of a model or its class, in order."""
    found: tuple[str, ...] = model.__struct_fields__
    return found


def keys(model: Any) -> tuple[str, ...]:
    """Return the keys of the fields in JSON, in order; most are the names."""
    found: tuple[str, ...] = model.__struct_encode_fields__
    return found


def marks(model: type[Any]) -> dict[str, Mapping[str, Any]]:
    """Return the marks of each field by name."""
    return {
        name: {
            mark.name: mark.value
            for mark in getattr(hint, "__metadata__", ())
            if isinstance(mark, Mark)
        }
        for name, hint in hints(model).items()
    }


def hints(model: type[Any]) -> dict[str, Any]:
    """Return the annotation of each field as it is written."""
    found: dict[str, Any] = {}
    for each in reversed(model.__mro__):
        found |= getattr(each, "__annotations__", {})
    return {name: found[name] for name in names(model)}


def values(model: Any) -> dict[str, Any]:
    """Return the values of a model by name; they are not copied."""
    found: dict[str, Any] = asdict(model)
    return found


def is_model(value: object) -> bool:
    """Return whether something is a model, or the class of one."""
    if isinstance(value, Struct):
        return True
    return isinstance(value, type) and value is not Struct and issubclass(value, Struct)


def hash_but(model: Any, name: str) -> int:
    """Return the hash of a model by all fields except one."""
    return hash(tuple({**values(model), name: None}.values()))


def equal_but(one: Any, other: object, name: str) -> Any:
    """Compare models for ``__eq__`` by all fields except one."""
    if type(other) is not type(one):
        return NotImplemented
    return {**values(one), name: None} == {**values(other), name: None}


# --- Gauges: numbers of a report, for monitoring.


class Gauge(Struct, frozen=True, kw_only=True):
    """A number, or one for each value of some labels."""

    name: str
    """Starts with ``msatools_``, and ends in the unit if there is one: ``_bytes``."""

    help: str
    labels: tuple[str, ...] = ()
    values: Mapping[tuple[str, ...], float]
    """The numbers by the values of the labels; without those that are not known."""


def single(name: str, help: str, value: float | None) -> Gauge:
    """Return a gauge of one number, which may not be known."""
    return Gauge(name=name, help=help, values={} if value is None else {(): value})


# --- Which rows of a command's reports --diff compares, and by which fields.


class DiffRows(Struct, frozen=True, kw_only=True):
    """Fields to compare in the rows under one key of a report."""

    name: str
    """Key of the rows in the report."""

    by: tuple[str, ...]
    """Fields that identify a row in both reports."""

    counts: tuple[str, ...] = ()
    """Fields whose numeric change is shown, or for lists the change of their length;
    the most important first."""

    facts: tuple[str, ...] = ()
    """Other fields, shown with both values."""

    lived: str | None = None
    """Field with the age of the task in a row; another start means another task."""


# --- The document of --why --json: what names in an output mean.


class Explained(Struct, frozen=True):
    """What one name means."""

    name: str
    """The name, as it is printed."""

    kind: str
    """What it is the name of, such as ``column``."""

    meaning: str
    """What it means, in a few words."""

    source: str
    """Where it comes from; empty if there is no more to say."""

    bound: str
    """Accuracy: ``exact``, ``estimate``, ``upper``, ``lower`` or ``not kept``."""


class Explanations(Struct, frozen=True):
    """The meanings of the names that were asked for."""

    schema: ClassVar[str] = "msatools.why/1"

    command: str
    """The command, without ``msa-``."""

    why: tuple[Explained, ...]
    """An entry for each name, and for each kind of a name with several."""


# --- Reports as programs, prompts and notebooks see them.


WIDTH = 120
"""Maximum length of the line that a report shows of itself at a prompt."""

_LEAST = 12
"""Minimum number of a path's last characters that are shown in any case."""


class Presented:
    """Base class of reports and differences: models with a ``schema``.

    Its methods do not depend on the class: all reports look alike.
    """

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as ``--json`` prints it, in plain values.

        Its keys are the names of the fields, but for Python's keywords: the key
        ``class`` is the field ``task_class``, ``sched_class`` or ``class_name``.
        docs/schema has the schemas.
        """
        found: dict[str, Any] = json.loads(_above("reports.forms").dumps(self))
        return found

    def __repr__(self) -> str:
        """Return one short line: the report's subject, and its numbers of rows."""
        rows = ", ".join(self._sizes()) or "no rows"
        files, others = self._subject()
        text = self._line([*files, *others], rows)
        if (over := len(text) - WIDTH) > 0:
            # Paths differ at their ends: cut them at the front.
            cut = -(-over // len(files)) + 1
            files = [f"…{each[cut:] or each[-_LEAST:]}" for each in files]
            text = self._line([*files, *others], rows)
        return text if len(text) <= WIDTH else f"{text[: WIDTH - 2]}…>"

    def _line(self, subject: Sequence[str], rows: str) -> str:
        # Text from a dump: repr() escapes what must not reach a terminal.
        return f"<{type(self).__name__} of {', '.join(map(repr, subject))}: {rows}>"

    def _subject(self) -> tuple[list[str], list[str]]:
        """Return the file and the release of a report; of a comparison, both files."""
        if (target := getattr(self, "target", None)) is not None:
            return [str(target.path)], [str(target.release)]
        sides = getattr(self, "before", None), getattr(self, "after", None)
        return [str(getattr(side, "file", None)) for side in sides], []

    def _sizes(self) -> Iterator[str]:
        marked = marks(type(self))
        for name, value in values(self).items():
            is_list = isinstance(value, Sequence) and not isinstance(value, str)
            if not is_list or not value or isinstance(value[0], float):
                continue  # a load average is no list of rows
            if "unlisted" not in marked[name]:
                yield f"{len(value):,} {name}"

    def __str__(self) -> str:
        """Return what the command prints, without colours."""
        text: str = _above("presentation").text(self)
        return text

    def __rich__(self) -> "Group":
        """Return what the command prints, for :func:`rich.print`."""
        text: Group = _above("presentation").rich_text(self)
        return text

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print what the command prints, for IPython's prompt."""
        for number, line in enumerate(str(self).splitlines()):
            if number:
                printer.break_()
            printer.text(line)

    def _repr_html_(self) -> str:
        """Return what the command prints, for a notebook."""
        html: str = _above("presentation").html(self)
        return html


def _above(module: str) -> Any:
    # Imported by name: modules that present models are above this one.
    return import_module(f"msatools.{module}")
