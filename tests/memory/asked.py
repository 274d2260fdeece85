# SPDX-License-Identifier: LGPL-2.1-or-later

"""Run msa-memstat on a dump that is already open."""

import io
from contextlib import redirect_stdout

from drgn import Program
from msatools.commands.memstat import COMMAND

from msatools.cli.drgn_prompt import run_in_drgn


def printed(prog: Program, *words: object) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        run_in_drgn(COMMAND, prog, [str(word) for word in words])
    return out.getvalue()
