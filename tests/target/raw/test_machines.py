# SPDX-License-Identifier: LGPL-2.1-or-later

"""The hole is found wherever the kernel lies, and with page tables of any depth."""

from pathlib import Path

import pytest

from fixtures import lab
from msatools.target import TargetSpec, open_target
from tests.target.raw import writers
from tests.target.raw.answers import answers

MACHINES = ("nokaslr-6.12", "la57off-6.12", "plain-7.x")
NAMED = "memstat", "prstat", "zombies", "cpus"


@pytest.mark.long
@pytest.mark.parametrize("name", MACHINES)
def test_machines(name: str, tmp_path: Path) -> None:
    """Half of the memory is below the hole, which begins at 512 MiB."""
    dump = lab.build(name).dump("qemu-kdump-zlib")
    memory = writers.from_kdump(dump, tmp_path / "memory")
    target = open_target(TargetSpec(path=str(memory), types="btf")).target
    assert target.format.startswith("raw memory, 1.0 GiB, hole at 0.5 GiB, kernel ")
    expected = answers(dump, *NAMED)
    for report in expected.values():
        report["target"]["dump_level"] = None
    assert answers(memory, *NAMED) == expected
    memory.unlink()
