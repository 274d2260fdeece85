# SPDX-License-Identifier: LGPL-2.1-or-later

"""Modules of drgn-tools' corelens print without debug info what they print with it."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from fixtures import lab
from tests.indrgn import corelens
from tests.indrgn.pairs import open_pair

SAME_AT_LEAST = 30
LACKING = {
    "cpuinfo": "the kernel has 2 symbols max_cstate",
    "sys": "the kernel has 2 symbols max_cstate",
}
"""What modules lack on 6.12: BTF does not say it, and no rule does."""


@pytest.fixture(scope="module")
def peer() -> Path:
    try:
        return corelens.environment()
    except corelens.NoPeerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def found(peer: Path, run_612: lab.Run) -> Mapping[str, str]:
    return corelens.compare(peer, run_612, open_pair(run_612))


def test_each_module_runs_or_says_what_it_lacks(found: Mapping[str, str]) -> None:
    assert len(found) > 40
    assert not [name for name, said in found.items() if "**" in said]
    lacking = {name: said for name, said in found.items() if "lacks" in said}
    assert lacking.keys() == LACKING.keys()
    assert all(LACKING[name] in said for name, said in lacking.items())
    same = [name for name, said in found.items() if said == corelens.SAME]
    assert len(same) >= SAME_AT_LEAST
    assert found["bt"].startswith("inlined frames; source lines")


def test_command(peer: Path, run_612: lab.Run) -> None:
    """corelens gets its types from the plugin, and no word of ours in its output."""
    words = [sys.executable, "-m", "drgn_tools.corelens", run_612.elf]
    done = subprocess.run(
        [*words, "-M", "mounts", "-M", "runq"],
        capture_output=True,
        text=True,
        check=True,
        env=corelens.surroundings(peer),
    )
    assert "CPU 0 RUNQUEUE:" in done.stdout
    assert "rootfs" in done.stdout
    assert "msatools" not in done.stdout
    assert "msatools: no debug info is loaded; types" in done.stderr
    assert "Traceback" not in done.stderr
