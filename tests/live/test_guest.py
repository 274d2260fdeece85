# SPDX-License-Identifier: LGPL-2.1-or-later

"""A guest of QEMU at rest: how it is opened, and msa-memstat's samples of it."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fixtures import lab
from msatools.program import TargetError, TargetSpec, describe, live, open_target
from tests.conftest import Msa


def test_guest_that_runs(live_qmp: str, run_612: lab.Run) -> None:
    prog, target = open_target(TargetSpec(qemu=live_qmp, vmlinux=str(run_612.vmlinux)))
    assert target.path == live_qmp
    assert (target.kind, target.live, target.crash) == ("qmp", True, None)
    assert target.release == run_612.release
    before = prog["jiffies"].value_()
    while prog["jiffies"].value_() == before:
        pass
    assert describe(prog).kind == "qmp"


def test_socket_held_by_another_client(
    live_qmp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live.connect(live_qmp):
        monkeypatch.setattr(live, "_TIMEOUT_S", 0.2)
        with pytest.raises(TargetError, match="no answer"):
            live.connect(live_qmp)


@pytest.mark.parametrize("types", ["btf", "dwarf"])
def test_another_kernel(live_qmp: str, run_612: lab.Run, types: Any) -> None:
    """Nobody has told of it: as after kexec."""
    vmlinux = str(run_612.vmlinux) if types == "dwarf" else None
    prog = open_target(TargetSpec(qemu=live_qmp, types=types, vmlinux=vmlinux)).prog
    for _ in range(2):
        with live.qmp_steady(prog):
            pass
    known = prog.cache[live._QMP_NAME]
    assert len(known._identity) == 4
    for number, word in enumerate(known._identity):
        before = known._identity
        known._identity = (*before[:number], word + 1, *before[number + 1 :])
        with (
            pytest.raises(TargetError, match="started anew"),
            live.qmp_steady(prog),
        ):
            pass
        known._identity = before
    with live.qmp_steady(prog):
        pass


# --- maps and fragmentation


def test_file_has_the_last_sample(msa: Msa, live_qmp: str, tmp_path: Path) -> None:
    path = tmp_path / "map.svg"
    done = msa("--qemu", live_qmp, "1", "2", "--json", "--frag", "--map", path)
    assert done.returncode == 0, done.stderr
    samples = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(samples) == 2
    for sample in samples:
        runs = sample["map"]["runs"]
        assert sum(run["pages"] for run in runs) == sample["pages"]
        states = ("free", "whole", "movable", "blocked", "partial")
        for size in sample["frag"]["sizes"]:
            found = sum(size[f"{state}_blocks"] for state in states)
            assert found == size["blocks"]
    assert list(tmp_path.iterdir()) == [path]
    assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_several_workers_cannot_read_over_qmp(
    live_guest: lab.Live, live_qmp: str, msa: Msa
) -> None:
    guest = ("--qemu", live_qmp, "-s", live_guest.vmlinux)
    done = msa(*guest, "-j", "2")
    assert done.returncode == 2
    assert done.stderr.startswith("msa-memstat: -j 2: ")
    assert len(done.stderr.splitlines()) == 1
    assert msa(*guest, "-j", "1").returncode == 0
