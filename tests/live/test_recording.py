# SPDX-License-Identifier: LGPL-2.1-or-later

"""Recordings of a guest that runs, from outside: what is shown again is what was seen.

The guest is the one of the session, over QMP.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(sys.executable).parent
COUNT = 3
PATIENCE_SECONDS = 300

Facts = dict[str, Any]


def run(name: str, *words: str) -> str:
    """What a command prints, which ends well and says nothing else."""
    ran = subprocess.run(
        [SCRIPTS / f"msa-{name}", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def samples(printed: str) -> list[Facts]:
    return [json.loads(line) for line in printed.splitlines()]


def record(name: str, qmp: str, file: Path, *words: str) -> str:
    target = ("--qemu", qmp, "--types", "btf", "0.5", str(COUNT))
    return run(name, *target, "--json", "--record", str(file), *words)


@pytest.mark.parametrize("name", ["prstat", "cpus"])
def test_shown_again(name: str, live_qmp: str, tmp_path: Path) -> None:
    file = tmp_path / "recording"
    printed = record(name, live_qmp, file)
    assert len(samples(printed)) == COUNT
    assert run(name, "--json", str(file)) == printed
    assert run(name, str(file)).count(f"\nmsa-{name}: ") == COUNT


def test_what_changed(live_qmp: str, tmp_path: Path) -> None:
    """From the first sample of a recording to the last: each CPU's counts."""
    file = tmp_path / "recording"
    first, *_, last = samples(record("cpus", live_qmp, file))
    found = json.loads(run("cpus", "--json", "--diff", str(file), str(file)))
    assert found["elapsed_ns"] == last["taken_at_ns"] - first["taken_at_ns"]
    assert [note["code"] for note in found["notes"]] == ["counts-of-intervals"]
    before = {row["cpu"]: row for row in first["cpus"]}
    after = {row["cpu"]: row for row in last["cpus"]}
    for change in found["changes"]["cpus"]:
        cpu = change["key"]["cpu"]
        for name, delta in change["deltas"].items():
            had, has = before[cpu][name], after[cpu][name]
            assert delta == (None if had is None or has is None else has - had)
