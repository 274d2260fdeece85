# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reports as programs, prompts and notebooks see them."""

import json
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from msatools.model import marks, values

if TYPE_CHECKING:
    from rich.console import Group


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
        found: dict[str, Any] = json.loads(_above("render.json").dumps(self))
        return found

    def __repr__(self) -> str:
        """Return one line: of what it is a report, and how many rows it has."""
        rows = ", ".join(self._sizes()) or "no rows"
        return f"<{type(self).__name__} of {self._subject()}: {rows}>"

    def _subject(self) -> str:
        # Text from a dump: repr() escapes what must not reach a terminal.
        if (target := getattr(self, "target", None)) is not None:
            return f"{target.path!r}, {target.release!r}"
        before, after = getattr(self, "before", None), getattr(self, "after", None)
        return f"{getattr(before, 'file', None)!r}, {getattr(after, 'file', None)!r}"

    def _sizes(self) -> Iterator[str]:
        marked = marks(type(self))
        for name, value in values(self).items():
            is_list = isinstance(value, Sequence) and not isinstance(value, str)
            if is_list and value and "unlisted" not in marked[name]:
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
    # By name: what shows the models stands above them.
    return import_module(f"msatools.{module}")
