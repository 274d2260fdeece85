# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reports in a kernel of Jupyter, which is no dependency of ours."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fixtures.lab.cache import content_key, default_cache
from tests.support.calls import CORE

PACKAGES = ("ipykernel", "jupyter_client")
CELLS = f"""
from drgn.commands import run_command
from msatools.program import TargetSpec, open_target
prog = open_target(TargetSpec(path={str(CORE)!r}, types="btf")).prog
report = run_command(prog, "prstat --json > /dev/null")
"""
CLIENT = """
import json, sys
from jupyter_client import KernelManager
manager = KernelManager()
manager.start_kernel()
client = manager.blocking_client()
client.start_channels()
client.wait_for_ready(timeout=60)
shown = []
def keep(message):
    shown.append((message["msg_type"], message["content"]))
for cell in json.load(sys.stdin):
    client.execute_interactive(cell, timeout=120, output_hook=keep)
client.stop_channels()
manager.shutdown_kernel(now=True)
json.dump(shown, sys.stdout)
"""


@pytest.fixture(scope="module")
def site() -> Path:
    """Return a directory with Jupyter's kernel, which only its processes see."""

    def fill(directory: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--target", directory, *PACKAGES], check=True)

    return default_cache().entry("peer", "jupyter", content_key([*PACKAGES]), fill)


@pytest.mark.long
def test_report_shows_itself_as_a_table(site: Path, tmp_path: Path) -> None:
    shown = _run(site, tmp_path, [CELLS, "report", "report.tasks[0].pid"])
    errors = [content for kind, content in shown if kind == "error"]
    assert not errors
    results = [content["data"] for kind, content in shown if kind == "execute_result"]
    report, pid = results
    assert "PROCESS/NLWP" in report["text/plain"].splitlines()[1]
    assert report["text/html"].startswith("<pre")
    assert "PROCESS/NLWP" in report["text/html"]
    assert int(pid["text/plain"]) > 0


def _run(site: Path, directory: Path, cells: list[str]) -> list[tuple[str, Any]]:
    """Run cells, and return the messages of the kernel."""
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", CLIENT],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": f"{site}{os.pathsep}{root}",
            "HOME": str(directory),
            "IPYTHONDIR": str(directory / "ipython"),
        },
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shown: list[tuple[str, Any]] = json.loads(done.stdout)
    return shown
