# SPDX-License-Identifier: LGPL-2.1-or-later

"""A command that is a fork ends as one does that was started."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import msatools

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os, sys
from fixtures.lab.guest import forked, livecommands

# Libraries that are compiled here are no modules, and not all are in a guest.
forked._NOT_IMPORTED += ("msatools.memory._classify", "msatools.selfdesc._tables")
forked.import_all()

def run(name, *words, **more):
    process = livecommands.start(name, *words, **more)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err

found = {
    "version": run("memstat", "--version"),
    "usage": run("prstat", "--nothing"),
    "error": run("locks", "/nowhere"),
    "prepared": run("cpus", "--version", prepare=lambda: print("first")),
    "failed": run("cpus", "--version", prepare=lambda: sys.exit("badly")),
}
# Nobody reads it from the start: --help fits into a pipe.
reader, writer = os.pipe()
os.close(reader)
closed = livecommands.start("memstat", "--help", stdout=writer)
found["closed"] = closed.wait(60), "", closed.stderr.read()
print(json.dumps(found))
"""


def test_forks_end_as_programs() -> None:
    command = [sys.executable, "-c", PROGRAM]
    found = json.loads(subprocess.check_output(command, cwd=ROOT))
    version = f"{msatools.__version__}\n"
    assert found["version"] == [0, f"msa-memstat {version}", ""]
    assert found["prepared"] == [0, f"first\nmsa-cpus {version}", ""]
    assert found["failed"] == [1, "", "badly\n"]
    assert found["closed"] == [-signal.SIGPIPE, "", ""]
    for name, status in (("usage", 2), ("error", 1)):
        assert found[name][:2] == [status, ""]
        assert found[name][2].count("\n") == 1
