# SPDX-License-Identifier: LGPL-2.1-or-later
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.lab import host, manytasks
from fixtures.lab.cache import Cache
from fixtures.lab.guest import cases
from fixtures.lab.guest.manytasks import KINDS

SECONDS = 10
UNLIKELY_HERE = {"fault", "inode", "flock", "range-lock"}
"""Kinds that need root, or /data as guests have it."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return manytasks.program(Cache(tmp_path_factory.mktemp("cache"), 1 << 30))


@pytest.fixture
def start(program: Path) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def run(kind: str, count: int) -> dict[str, Any]:
        words = [program, kind, str(count)]
        started.append(
            subprocess.Popen(
                words, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        )
        output = started[-1].stdout
        assert output
        made: dict[str, Any] = json.loads(output.readline())
        return made

    yield run
    for process in started:
        # The child that one kind waits for would outlive it.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


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
    expected = cases.LOOKS[KINDS[kind]][0]
    until = time.monotonic() + SECONDS
    while any(cases.state_of(pid, tid) not in expected for tid in tids):
        assert time.monotonic() < until
        time.sleep(0.01)


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
