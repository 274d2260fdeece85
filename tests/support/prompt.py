# SPDX-License-Identifier: LGPL-2.1-or-later

"""Run a command on a program that is already open, as at drgn's prompt."""

import io
import json
from contextlib import redirect_stdout
from typing import Any

from drgn import Program

from msatools.cli.drgn_prompt import run_in_drgn
from msatools.registry import load


def printed(prog: Program, command: str, *words: object) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        run_in_drgn(load(command), prog, [str(word) for word in words])
    return out.getvalue()


def reported(prog: Program, command: str, *words: object) -> Any:
    """Return the JSON that a command prints."""
    return json.loads(printed(prog, command, "--json", *words))
