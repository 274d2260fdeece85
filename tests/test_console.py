# SPDX-License-Identifier: LGPL-2.1-or-later

"""Console scripts."""

import subprocess
import sys
from pathlib import Path

import pytest

from msatools import console

INTERRUPTED = """
import os, signal, sys
from msatools.console import cpus
class Finder:
    @staticmethod
    def find_spec(name, *_):
        if name == "numpy":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
{before}
sys.argv = ["msa-cpus", "nowhere"]
sys.exit(cpus())
"""


def interrupted(before: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a command that gets Ctrl-C while it imports numpy."""
    source = INTERRUPTED.format(before=before)
    return subprocess.run(
        [sys.executable, "-c", source],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_ctrl_c_while_modules_are_imported_is_quiet() -> None:
    ran = interrupted()
    assert (ran.returncode, ran.stdout, ran.stderr) == (-2, "", "")


def test_ignored_ctrl_c_stays_ignored() -> None:
    """As in the background of a shell without job control."""
    ran = interrupted("signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert ran.returncode == 1
    assert ran.stderr == "msa-cpus: nowhere: no such file; check the path\n"


def test_no_such_command() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        console.nothing  # noqa: B018


def test_leaves_at_once_with_all_output_written() -> None:
    """What runs at exit runs, modules are not taken apart, and nothing is lost."""
    code = (
        "import atexit, sys\n"
        "from msatools.console import leave\n"
        "class Freed:\n"
        "    def __del__(self): print('freed', flush=True)\n"
        "kept = Freed()\n"
        "atexit.register(print, 'at exit', flush=True)\n"
        "print('output')\n"
        "leave(3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (3, "output\nat exit\n")


def test_leaves_as_usual_if_the_output_is_closed() -> None:
    code = (
        "import sys; from msatools.console import leave; "
        "sys.stdout.close(); sys.exit(leave(1))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 1
