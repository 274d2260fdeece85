# SPDX-License-Identifier: LGPL-2.1-or-later

"""A cluster that is there: workers of another scheduler, started as the page says."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fixtures.demo import DEMOS
from tests.fleet.dumps import START, copy_dump

DASK = Path(sys.executable).with_name("dask")
FLEET = Path(sys.executable).with_name("msa-fleet")
ROOT = Path(__file__).parents[2]
DUMPS = 4


@contextmanager
def running(*words: str | Path) -> Iterator[None]:
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()
            process.wait()


@pytest.mark.long
def test_scheduler(tmp_path: Path) -> None:
    for number in range(DUMPS):
        dump = tmp_path / f"crash/{number}.kdump"
        copy_dump(DEMOS["6.12"].core, dump, f"h{number}", START)
    file, results = tmp_path / "scheduler.json", tmp_path / "results"
    with ExitStack() as stack:
        words = ("--no-dashboard", "--scheduler-file", file)
        stack.enter_context(running(DASK, "scheduler", *words, "--port", "0"))
        for _ in range(2):
            stack.enter_context(running(DASK, "worker", *words, "--nthreads", "1"))
        while not file.exists():
            time.sleep(0.1)
        address = json.loads(file.read_text())["address"]
        words = ("run", tmp_path / "crash", "-o", results, "--scheduler", address)
        ran = subprocess.run([FLEET, *words], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith(f"{DUMPS} dumps read, {DUMPS} done; ")
    query = "SELECT worker, count(*) AS n FROM dumps GROUP BY 1"
    asked = subprocess.run(
        [FLEET, "sql", results, query, "--json"], stdout=subprocess.PIPE, check=True
    )
    assert json.loads(asked.stdout) == {"worker": socket.gethostname(), "n": DUMPS}
