# SPDX-License-Identifier: LGPL-2.1-or-later

"""A program in place of :mod:`msatools.console`: what it does is in the file it reads.

A file that starts as a dump is read as ever.

Its arguments are PARENT MEMORY SECONDS report --json -c PATH.
"""

import json
import os
import signal
import sys
import time
from typing import Any

from msatools.fleet.single import BOUNDED, program

PROGRAM = program("tests.fleet.program")


def made_report(**crash: Any) -> dict[str, Any]:
    """Return as much of a report as there is in all of them."""
    return {
        "schema": "msatools.report/1",
        "target": {"release": "6.12.1", "arch": "x86_64", "truncated": False},
        "machine": {"host": "made", "time_ns": 1_795_000_000_000_000_000},
        "verdicts": [],
        "crash": crash or None,
    }


def main() -> None:
    """Do what the first word of the file says."""
    from msatools.cli.sandbox import lock_down

    _, memory, seconds, *_, path = sys.argv[1:]
    with open(path, "rb") as dump:
        if dump.read(4) in (b"KDUM", b"\x7fELF", b"\0\0\0\0", b"DAMA"):
            os.execv(sys.executable, (*BOUNDED, *sys.argv[1:]))
    lock_down(None, int(memory), int(seconds))
    with open(path) as file:
        word, _, rest = file.read().partition("\n")
    if word == "report":
        print(rest)
    elif word == "hang":
        time.sleep(1000)
    elif word == "spin":
        while True:
            pass
    elif word == "eat":
        eaten = []
        while True:
            eaten.append(bytearray(1 << 24))
    elif word == "flood":
        while True:
            print("x" * (1 << 16))
    elif word == "die":
        os.kill(os.getpid(), getattr(signal, rest.strip()))
    elif word == "fail":
        print(rest, file=sys.stderr)
        sys.exit(1)


def file_of(word: str, rest: str = "") -> str:
    """Return the contents of a file that has this done."""
    return f"{word}\n{rest}"


def file_of_report(report: dict[str, Any]) -> str:
    """Return the contents of a file that has a report printed."""
    return file_of("report", json.dumps(report))
