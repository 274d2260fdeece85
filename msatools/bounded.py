# SPDX-License-Identifier: LGPL-2.1-or-later

"""One command in this process, in the sandbox of ``--sandbox`` and with its own bounds.

Its arguments are PARENT MEMORY SECONDS COMMAND [ARGUMENT...]. It is how msa-fleet has
each dump read: PARENT is the process that waits for it.
"""

import os
import sys
from collections.abc import Sequence

from msatools.cli.sandbox import binding, lock_down
from msatools.program import formats

EXIT_NO_SANDBOX = 71
"""Exit status if the sandbox cannot be set up; <sysexits.h> EX_OSERR."""


def main(argv: Sequence[str] | None = None) -> int:
    """Give up all that reading does not need, run a command, return its status."""
    argv = sys.argv[1:] if argv is None else argv
    parent, memory_bytes, seconds = map(int, argv[:3])
    name, *arguments = argv[3:]
    for argument in arguments:
        formats.copy(argument)
    try:
        lock_down(binding(), memory_bytes, seconds)
    except (OSError, ValueError) as error:
        print(f"the sandbox cannot be set up: {error}", file=sys.stderr)
        return EXIT_NO_SANDBOX
    if os.getppid() != parent:
        # It ended before it was to take this process with it.
        return EXIT_NO_SANDBOX
    from msatools.console import run

    return run(name, arguments)
