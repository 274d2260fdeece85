# SPDX-License-Identifier: LGPL-2.1-or-later

"""How fast msa-locks is, beside drgn-tools' lock module, on one dump in one run.

drgn-tools is not published as a package, and wants a drgn of its own: its source is to
be named, and is installed apart. What is timed is the search for locks alone, without
what either takes to start and to open the dump.
"""

import itertools
import statistics
import subprocess
import tempfile
import time
import venv
from pathlib import Path

from fixtures import lab
from msatools.locks.locks import collect_locks
from msatools.program import TargetSpec, open_target
from tests.bench.timing import beside

KERNELS = ("6.1", "6.12")
_PEER = """
import contextlib, io, sys, time
from drgn import Program
from drgn_tools.lock import scan_lock
prog = Program()
prog.set_core_dump(sys.argv[1])
prog.load_debug_info([sys.argv[2]])
start = time.perf_counter()
with contextlib.redirect_stdout(io.StringIO()):
    scan_lock(prog, False)
print(time.perf_counter() - start)
"""


def compare(rounds: int, source: Path | None) -> None:
    """Time both in turn, on each kernel, and ours on one dump with many waiters.

    :param source: The peer's source; without it only ours is timed.
    """
    with tempfile.TemporaryDirectory() as directory:
        peer = None if source is None else _install(source, Path(directory))
        for kernel in KERNELS:
            compare_one(kernel, rounds, peer)
            print()


def _install(source: Path, directory: Path) -> Path:
    """Install the peer with the drgn that it wants; give its interpreter."""
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", source], check=True)
    return python


def compare_one(kernel: str, rounds: int, peer: Path | None) -> None:
    few, many = lab.build(f"tasks-{kernel}"), lab.build(f"manyfutexes-{kernel}")
    ours: dict[str, list[tuple[float, int, int]]] = {"few": [], "many": []}
    theirs: list[float] = []
    for _, (name, run) in itertools.product(
        range(rounds), (("few", few), ("many", many))
    ):
        ours[name].append(_ours(run))
        if peer and name == "few":
            theirs.append(_theirs(run, peer))
    seconds = {
        name: statistics.median(took for took, _, _ in times)
        for name, times in ours.items()
    }
    print(f"{'LOCKS, ' + few.release:34}{'tasks':>8}{'blocked':>9}{'seconds':>9}")
    for name, times in ours.items():
        _, tasks, blocked = times[0]
        text = f"msa-locks, {'scenario tasks' if name == 'few' else 'many futexes'}"
        print(f"{text:34}{tasks:8,}{blocked:9,}{seconds[name]:9.3f}")
    each = {name: seconds[name] / ours[name][0][2] for name in ours}
    print(
        f"a blocked task of many takes {each['many'] / each['few']:.2f} of one of few"
    )
    if theirs:
        took = statistics.median(theirs)
        beside(f"msa-locks, {few.release}", "drgn-tools lock", seconds["few"], took)
        print(f"{'drgn-tools lock, the first':34}{'':17}{took:9.3f}")
        print(f"msa-locks is {took / seconds['few']:.1f} x as fast")
    else:
        print("drgn-tools is not compared: name its source with --drgn-tools")


def _ours(run: lab.Run) -> tuple[float, int, int]:
    """Time one report: seconds, tasks, and how many are blocked."""
    target = open_target(TargetSpec(path=str(run.elf), types="btf"))
    start = time.perf_counter()
    report = collect_locks(target.prog, target=target.target)
    took = time.perf_counter() - start
    return took, report.coverage["tasks"], report.coverage["blocked"]


def _theirs(run: lab.Run, python: Path) -> float:
    command = [python, "-c", _PEER, str(run.elf), str(run.vmlinux)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])
