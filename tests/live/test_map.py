# SPDX-License-Identifier: LGPL-2.1-or-later

"""Maps and fragmentation of a guest that runs."""

import json
from pathlib import Path
from xml.etree import ElementTree

from tests.conftest import Msa


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


def test_text_of_each_sample(msa: Msa, live_qmp: str) -> None:
    done = msa("--qemu", live_qmp, "1", "2", "--map")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Physical memory, 1.0 MiB a cell") == 2
