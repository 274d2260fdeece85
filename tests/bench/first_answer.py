# SPDX-License-Identifier: LGPL-2.1-or-later

"""The first answer: whole processes, from their start to their end, beside drgn's own.

drgn's ``%crash`` commands have debug info, which they need. Pages that a demo core does
not have end some of them early, which is in their favour. What counts is CPU time.
"""

import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from fixtures import lab
from fixtures.demo import DEMOS
from msatools.registry import NAMES
from tests.bench.process import run_in_turn
from tests.bench.timing import beside

KERNEL = "6.12"
LIMIT_S = 0.35
"""What a command may take on the demo core."""

LIMIT_OF_ALL_S = 1.5
"""What msa-report may take, which reads what all the others read."""

LIMIT_OF_HELP_S = 0.12
PEERS = {
    "kmem -i": "memstat",
    "kmem -s": "memstat --by slab",
    "ps": "prstat",
    "runq; irq -s": "cpus",
}
"""Commands of ``%crash``, and ours that answers the same and more."""

_CRASH = """
import sys
from drgn import FaultError, Program
from drgn.commands import run_command
import drgn.commands._crash
prog = Program()
prog.set_core_dump(sys.argv[1])
prog.load_debug_info([sys.argv[2]], main=True)
for command in sys.argv[3].split(";"):
    try:
        run_command(prog, "crash " + command.strip())
    except FaultError:
        pass
"""


def compare(rounds: int) -> None:
    """Time each on the demo core and on a dump of 1 GiB, and print medians."""
    run = lab.build(f"tasks-{KERNEL}")
    limits = {
        **{
            f"msa-{name} --help": (ours(f"{name} --help"), LIMIT_OF_HELP_S)
            for name in NAMES
        },
        **{f"msa-{name}": _answer(name) for name in NAMES},
    }
    seconds = medians({name: command for name, (command, _) in limits.items()}, rounds)
    print(f"{'FIRST ANSWER, THE DEMO CORE, CPU':40}{'seconds':>10}{'limit':>10}")
    for name, (_, limit) in limits.items():
        print(f"{name:40}{seconds[name]:10.3f}{limit:10.2f}")
    for dump in (DEMOS[KERNEL].core, run.elf):
        _beside(dump, run.vmlinux, rounds)


def _answer(name: str) -> tuple[list[object], float]:
    """Return a command on the demo core, and what it may take."""
    words = f"{name} init_task+8" if name == "whatis" else name
    limit = LIMIT_OF_ALL_S if name == "report" else LIMIT_S
    return ours(words, DEMOS[KERNEL].core), limit


def _beside(dump: Path, vmlinux: Path, rounds: int) -> None:
    commands = {}
    for peer, name in PEERS.items():
        commands[name] = ours(name, dump)
        commands[peer] = [sys.executable, "-c", _CRASH, dump, vmlinux, peer]
    seconds = medians(commands, rounds)
    print(f"\n{f'BESIDE %crash, {dump.name}, CPU':40}{'ours':>10}{'%crash':>10}")
    for peer, name in PEERS.items():
        took = seconds[name], seconds[peer]
        beside(f"msa-{name}, {dump.name}", f"%crash {peer}", *took)
        row = f"msa-{name}, {peer}"
        print(f"{row:40}{took[0]:10.3f}{took[1]:10.3f}{took[0] / took[1]:8.2f} x")


def ours(words: str, *dump: Path) -> list[object]:
    """Return the command line of an installed command."""
    name, *options = shlex.split(words)
    return [Path(sys.executable).with_name(f"msa-{name}"), *options, *dump]


def medians(commands: dict[str, Sequence[object]], rounds: int) -> dict[str, float]:
    """Run all in turn, once more than counts, and return the CPU seconds of each."""
    used = run_in_turn(commands, rounds + 1)
    return {
        name: statistics.median(usage.cpu_seconds for usage in usages[1:])
        for name, usages in used.items()
    }
