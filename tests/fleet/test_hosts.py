# SPDX-License-Identifier: LGPL-2.1-or-later

"""A cluster that is there: two hosts serve one scheduler.

The hosts are network namespaces of this machine, with names of their own.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fixtures.demo import DEMOS
from tests.fleet.dumps import START, copy_dump

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and iproute2",
    ),
]

DASK = Path(sys.executable).with_name("dask")
FLEET = Path(sys.executable).with_name("msa-fleet")
ROOT = Path(__file__).parents[2]
HOSTS = ("msa-one", "msa-two")
DUMPS = 12


def run(*words: str) -> None:
    subprocess.run(words, check=True)


@contextmanager
def host(name: str, number: int) -> Iterator[str]:
    """Make a network namespace that sees this machine alone; yield our address."""
    here, there = f"10.231.{number}.1", f"10.231.{number}.2"
    outer, inner = f"msa{number}a", f"msa{number}b"
    run("ip", "netns", "add", name)
    try:
        run("ip", "link", "add", outer, "type", "veth", "peer", inner, "netns", name)
        run("ip", "addr", "add", f"{here}/24", "dev", outer)
        run("ip", "link", "set", outer, "up")
        run("ip", "-n", name, "addr", "add", f"{there}/24", "dev", inner)
        run("ip", "-n", name, "link", "set", inner, "up")
        yield here
    finally:
        run("ip", "netns", "del", name)


@contextmanager
def running(*words: str | Path) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def test_two_hosts(tmp_path: Path) -> None:
    core = DEMOS["6.12"].core
    for number in range(DUMPS):
        copy_dump(core, tmp_path / f"crash/{number}.kdump", f"h{number}", START)
    scheduler_file = tmp_path / "scheduler.json"
    with ExitStack() as stack:
        addresses = [
            stack.enter_context(host(name, number))
            for number, name in enumerate(HOSTS, 1)
        ]
        words = ("scheduler", "--no-dashboard", "--scheduler-file", scheduler_file)
        stack.enter_context(running(DASK, *words, "--port", "0"))
        while not scheduler_file.exists():
            time.sleep(0.1)
        port = json.loads(scheduler_file.read_text())["address"].rpartition(":")[2]
        for name, address in zip(HOSTS, addresses, strict=True):
            worker = f"{DASK} worker tcp://{address}:{port} --nthreads 1 --no-dashboard"
            inside = ("sh", "-c", f"hostname {name}; exec {worker}")
            enter = ("ip", "netns", "exec", name, "unshare", "--uts")
            stack.enter_context(running(*enter, *inside))
        results = tmp_path / "results"
        ran = subprocess.run(
            [
                *(FLEET, "run", tmp_path / "crash", "-o", results),
                *("--scheduler", f"tcp://{addresses[0]}:{port}"),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
    assert ran.stderr == ""
    assert ran.stdout.startswith(f"{DUMPS} dumps read, {DUMPS} done; ")
    query = "SELECT worker, count(*) AS n FROM dumps GROUP BY 1 ORDER BY 1"
    asked = subprocess.run(
        [FLEET, "sql", results, query, "--json"], stdout=subprocess.PIPE, check=True
    )
    found = [json.loads(line) for line in asked.stdout.splitlines()]
    assert [row["worker"] for row in found] == [*HOSTS]
    assert sum(row["n"] for row in found) == DUMPS
