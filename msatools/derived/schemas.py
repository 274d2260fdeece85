# SPDX-License-Identifier: LGPL-2.1-or-later

"""JSON Schemas of the output of ``--json``: ``python -m msatools.derived.schemas``."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msatools.registry import NAMES, load
from msatools.reports.schema import Schema, schema_of


def schemas() -> dict[str, Schema]:
    """Return all schemas by name and version, such as ``msatools.memstat/1``."""
    return {
        name: schema_of(model, name, f"output of {command}")
        for name, model, command in _documents()
    }


def file_name(schema: str) -> str:
    """Return the name of a schema's file: ``memstat-1.json`` for msatools.memstat/1."""
    return f"{schema.removeprefix('msatools.').replace('/', '-')}.json"


def text_of(schema: Schema) -> str:
    """Return the contents of a schema's file."""
    return json.dumps(schema, indent=2) + "\n"


def _documents() -> Iterator[tuple[str, type[Any], str]]:
    """Yield the name of each schema, its model, and the command that prints it."""
    from msatools.fleet.single import FleetReport
    from msatools.memory.diff import MemstatDiff
    from msatools.model import Explanations
    from msatools.reports.diff import ReportDiff, diff_schema
    from msatools.selfcheck.model import SelfCheckReport

    for name in NAMES:
        command = load(name)
        model = _printed(command.recorded.model())
        yield model.schema, model, f"msa-{name} --json"
        if command.compared:
            yield diff_schema(name), ReportDiff, f"msa-{name} --json --diff"
    yield MemstatDiff.schema, MemstatDiff, "msa-memstat --json --diff"
    yield FleetReport.schema, FleetReport, "msa-fleet show --json"
    yield Explanations.schema, Explanations, "msa-NAME --json --why"
    yield SelfCheckReport.schema, SelfCheckReport, "msa-NAME --json --self-check"


def _printed(model: type[Any]) -> type[Any]:
    """Return the class of printed reports, a base of the class of recorded ones."""
    return next(each for each in model.__mro__ if "schema" in vars(each))


def main(folder: str = "docs/schema") -> None:
    """Write the files of all schemas to a folder."""
    for name, schema in schemas().items():
        (Path(folder) / file_name(name)).write_text(text_of(schema))


if __name__ == "__main__":
    main(*sys.argv[1:])
