# SPDX-License-Identifier: LGPL-2.1-or-later

"""The hole is found wherever the kernel lies, and with page tables of any depth."""

from pathlib import Path

import pytest

from fixtures import lab
from msatools.program import TargetSpec, open_target
from tests.program.raw import writers
from tests.program.raw.answers import answers

HOLE = ", hole at 0.5 GiB"
MACHINES = {
    "nokaslr-6.12": HOLE,
    "la57off-6.12": HOLE,
    "plain-7.x": HOLE,
    # Its memory begins at 1 GiB.
    "plain-6.12arm64": "",
}
NAMED = "memstat", "prstat", "zombies", "cpus"


@pytest.mark.long
@pytest.mark.parametrize("name", MACHINES)
def test_machines(name: str, tmp_path: Path) -> None:
    """On x86-64 half of the memory is above the hole, which begins at 512 MiB."""
    dump = lab.build(name).dump("qemu-kdump-zlib")
    memory = writers.from_kdump(dump, tmp_path / "memory")
    target = open_target(TargetSpec(path=str(memory), types="btf")).target
    assert target.format.startswith(f"raw memory, 1.0 GiB{MACHINES[name]}, kernel ")
    expected = answers(dump, *NAMED)
    for report in expected.values():
        report["target"]["dump_level"] = None
    assert answers(memory, *NAMED) == expected
