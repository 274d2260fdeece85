# SPDX-License-Identifier: LGPL-2.1-or-later

"""No command has a thread, but those that Dask starts for msa-fleet; nor numpy.ma."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.demo import DEMOS
from msatools.registry import NAMES
from tests.support.calls import CORE, OPERANDS
from tests.support.strace import Traced, threads_of

BIN = Path(sys.executable).parent
VARIABLE = "OPENBLAS_NUM_THREADS"
ENV = {name: value for name, value in os.environ.items() if name != VARIABLE}
OF_TWO = min(2, len(os.sched_getaffinity(0))) - 1
"""Threads that OpenBLAS starts beside the first if two are allowed."""

IN_DRGN = """
import os, sys
from drgn.commands import run_command
for line in {lines!r}:
    run_command(prog, line)
print("numpy", "numpy" in sys.modules)
print("variable", os.environ.get("OPENBLAS_NUM_THREADS"))
"""
OF_OPENBLAS = """
import atexit, ctypes, re, sys
def count():
    assert "numpy" in sys.modules
    maps = open("/proc/self/maps").read()
    for path in set(re.findall(r"/\\S*openblas\\S*", maps)):
        library = ctypes.CDLL(path)
        for start in ("", "scipy_"):
            for end in ("", "64_", "_64"):
                name = f"{start}openblas_get_num_threads{end}"
                if hasattr(library, name):
                    print("threads", getattr(library, name)(), file=sys.stderr)
atexit.register(count)
from msatools.console import fleet
sys.exit(fleet())
"""


MASKED = """
import atexit, sys
atexit.register(lambda: print("numpy.ma" in sys.modules, file=sys.stderr))
from msatools import console
sys.exit(getattr(console, sys.argv.pop(1))())
"""


@pytest.mark.parametrize("name", NAMES)
def test_masked_arrays_are_not_imported(name: str) -> None:
    """np.unique() and np.isin() may import them, which takes some 10 ms."""
    done = subprocess.run(
        [sys.executable, "-c", MASKED, name, *words_of(name), CORE],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == "False\n"


def traced(*words: str | Path, **env: str) -> list[Traced]:
    """Run a program of the installation; return its processes."""
    return threads_of([BIN / words[0], *words[1:]], {**ENV, **env})


def words_of(name: str) -> tuple[str, ...]:
    return OPERANDS.get(name, ())


@pytest.mark.parametrize("name", NAMES)
def test_commands(name: str) -> None:
    (script, *_) = found = traced(f"msa-{name}", *words_of(name), CORE)
    assert f"msa-{name}" in script.program
    assert sum(each.threads for each in found) == 0


@pytest.mark.parametrize(
    "words", [(CORE,), ("--help",), ("memstat", "--sandbox", CORE)]
)
def test_front_door(words: tuple[str, ...]) -> None:
    assert sum(each.threads for each in traced("msa", *words)) == 0


def test_choice_of_the_user_stays() -> None:
    found = traced("msa-memstat", CORE, **{VARIABLE: "2"})
    assert sum(each.threads for each in found) == OF_TWO


def test_in_drgn(tmp_path: Path) -> None:
    lines = [" ".join((name, *words_of(name))) for name in NAMES]
    found, out = in_drgn(lines, tmp_path)
    assert sum(each.threads for each in found) == 0
    # Programs that are started from the prompt later do not have it.
    assert out.endswith("numpy True\nvariable None\n")


def test_choice_of_the_user_stays_in_drgn(tmp_path: Path) -> None:
    found, out = in_drgn(["memstat"], tmp_path, **{VARIABLE: "2"})
    assert sum(each.threads for each in found) == OF_TWO
    assert out.endswith("variable 2\n")


def in_drgn(lines: list[str], folder: Path, **env: str) -> tuple[list[Traced], str]:
    """Run commands in a script of drgn; return its processes and its output."""
    script, out = folder / "script.py", folder / "out"
    script.write_text(f"import sys; sys.stdout = open({str(out)!r}, 'w')\n")
    with script.open("a") as file:
        file.write(IN_DRGN.format(lines=lines))
    found = traced("drgn", "--no-default-symbols", "-c", CORE, script, **env)
    return found, out.read_text()


def test_fleet(tmp_path: Path) -> None:
    """Each dump is read by a process with one thread; Dask and the database have more,
    of which none is of numpy."""
    results = tmp_path / "results"
    core = DEMOS["6.12"].core
    found = traced("msa-fleet", "run", core, "-o", results, "-j", "1", "--strict")
    (reader,) = [each for each in found if "msatools.console import" in each.program]
    assert reader.threads == 0
    others = [each.program for each in found if sys.executable in each.program]
    assert len(others) > 1
    assert all(f'"{VARIABLE}=1"' in each for each in others)
    for env, threads in ((ENV, 1), ({**ENV, VARIABLE: "2"}, 1 + OF_TWO)):
        done = subprocess.run(
            [sys.executable, "-c", OF_OPENBLAS, "show", results],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == f"threads {threads}\n"
