# SPDX-License-Identifier: LGPL-2.1-or-later

"""What all commands answer on a file, without what names the file."""

import json
from pathlib import Path
from typing import Any

from msatools.program import open_target
from tests.contract.table import ROWS
from tests.support.calls import call

_OF_THE_FILE = ("path", "kind", "format")
_OF_THE_RUN = ("scan_ns",)


def answers(path: Path, *names: str) -> dict[str, Any]:
    """Return the JSON of commands, by name; of all if none is named."""
    found = {}
    for row in ROWS:
        if names and row.name not in names:
            continue
        ran = call(row.command, "--json", "-c", str(path), opening=open_target)
        assert (ran.status, ran.err) == (0, ""), row.name
        report = json.loads(ran.out.replace(str(path), "FILE"))
        for key in _OF_THE_FILE:
            del report["target"][key]
        for key in _OF_THE_RUN:
            report.pop(key, None)
        # Of an ELF dump not all of the memmap is read: see msatools.memory.stream.
        del report["coverage"]["bytes_read"]
        found[row.name] = report
    return found
