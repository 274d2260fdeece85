# SPDX-License-Identifier: LGPL-2.1-or-later

"""A guest in which no storm was is built anew."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fixtures.lab import LabError, storm
from fixtures.lab.guest.storm import ROUNDS

READINGS = [
    {"rounds": [3, 0], "online": "0-1"},
    {"rounds": [4, 0], "online": "0"},
    {"rounds": [3 + ROUNDS, ROUNDS], "online": "0-1"},
]


def check(directory: Path, readings: list[dict[str, Any]]) -> None:
    lines = [
        {"kind": "start", "storm": ["tasks", "cpu"]},
        {"kind": "sample", "line": "x"},
        *({"kind": "reading", **reading} for reading in readings),
    ]
    with gzip.open(directory / storm.RESULTS, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    storm.check(SimpleNamespace(directory=directory))  # type: ignore[arg-type]


def test_storm(tmp_path: Path) -> None:
    check(tmp_path, READINGS)


def test_part_that_stood_still(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=f"part tasks: {ROUNDS - 1} rounds"):
        check(tmp_path, [{"rounds": [4, 0], "online": "0"}, *READINGS[1:]])


def test_cpu_that_never_went(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"online CPUs: 0-1$"):
        check(tmp_path, READINGS[::2])
