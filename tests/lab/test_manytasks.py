# SPDX-License-Identifier: LGPL-2.1-or-later
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fixtures.lab import host, manytasks
from fixtures.lab.cache import Cache
from fixtures.lab.guest import cases
from fixtures.lab.guest.manytasks import KINDS
from tests.lab.waiting import wait_until_in_class

UNLIKELY_HERE = {"fault", "inode", "flock", "range-lock"}
"""Kinds that need root, or /data as guests have it."""


@pytest.fixture(scope="module")
def program(programs: Cache) -> Path:
    return manytasks.program(programs)


@pytest.fixture
def start(program: Path, spawn: Any) -> Any:
    def run(kind: str, count: int) -> dict[str, Any]:
        process = spawn(program, kind, str(count), stdout=subprocess.PIPE, text=True)
        made: dict[str, Any] = json.loads(process.stdout.readline())
        return made

    return run


def test_program_knows_every_kind() -> None:
    table = re.search(r"kinds\[\] = \{(.*?)\n\};", manytasks.PROGRAM.read_text(), re.S)
    assert table
    assert re.findall(r'\{ "([a-z-]+)"', table[1]) == list(KINDS)
    assert set(KINDS.values()) <= set(cases.LOOKS)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in UNLIKELY_HERE])
def test_threads_wait(kind: str, start: Any) -> None:
    made = start(kind, 30)
    pid, tids = made["pid"], made["tids"]
    assert len(set(tids)) == 30
    for tid in tids:
        wait_until_in_class(pid, tid, KINDS[kind])


def test_zombies(start: Any) -> None:
    made = start("zombies", 30)
    assert len(set(made["zombies"])) == 30
    for pid in made["zombies"]:
        stat = cases.text_of(pid, pid, "stat").rpartition(") ")[2].split()
        assert (stat[0], int(stat[1])) == ("Z", made["pid"])


def test_unknown_kind(program: Path) -> None:
    done = subprocess.run([program, "nothing", "1"], check=False, capture_output=True)
    assert done.returncode == 2


def test_programs_of_the_host_have_packages() -> None:
    assert {"crash", "strace"} <= set(host.PACKAGE_OF)
