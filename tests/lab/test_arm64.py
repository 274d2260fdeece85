# SPDX-License-Identifier: LGPL-2.1-or-later
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fixtures.lab import arm64, cpus, image, memory, tasks
from fixtures.lab.cache import Cache
from fixtures.lab.kernels import KERNELS
from fixtures.lab.scenario import Scenario


@pytest.mark.parametrize(
    "scenario", [memory.SCENARIO, tasks.SCENARIOS[0], cpus.SCENARIO]
)
def test_machine_is_one_of_arm64(scenario: Scenario) -> None:
    made = scenario.machine(KERNELS["6.12arm64"])
    words = [arm64.argument(word) for word in made.arguments()]
    assert words[words.index("-machine") + 1].startswith("virt,")
    assert words[words.index("-cpu") + 1] == "max,pauth-impdef=on"
    assert f"{made.mib}M" in words


def test_console_is_that_of_arm64() -> None:
    found = arm64.argument("console=ttyS0 quiet lab.disks=root")
    assert found == "console=ttyAMA0 quiet lab.disks=root"
    assert arm64.argument("qemu-system-x86_64") == "qemu-system-aarch64"
    assert arm64.argument("job=max") == "job=max"


def test_numbers_of_system_calls_are_those_of_arm64() -> None:
    text = (image.GUEST / "calls.py").read_text()
    made = arm64.translated(text)
    changed = dict(
        line.split(" = ") for line in set(made.splitlines()) - set(text.splitlines())
    )
    assert changed == {
        name: str(number)
        for name, number in arm64.NUMBERS.items()
        if f"\n{name} = " in text
    }
    assert changed["FUTEX"] == "98"
    assert "IO_URING_SETUP = 425" in made
    assert arm64.translated('match("sys_pause")') == 'match("sigsuspend")'
    assert arm64.translated("FUTEX = 202 + 1\n") == "FUTEX = 202 + 1\n"


class UnbuiltCache(Cache):
    """One whose entries have a place and are never made."""

    def entry(self, kind: str, name: str, *_: Any) -> Path:
        return self.root / kind / name


def test_programs_are_for_arm64(tmp_path: Path) -> None:
    cache = UnbuiltCache(tmp_path, 1)
    made = arm64.image(memory.IMAGE, cache, arm64.WORDS)
    assert made.files["/lab/truth"] == tmp_path / "program/truth-arm64/truth"
    assert "/lab/server" not in made.files
    of_lab = "/lab/fixtures/lab/guest/lab.py"
    assert made.files[of_lab] == tmp_path / "program/lab-arm64/lab.py"
    assert made.files["/lab/start"] == memory.IMAGE.files["/lab/start"]
    assert made.files[arm64.SITE].name == "sigsuspend.py"
    server = dataclasses.replace(memory.IMAGE, files={"/lab/server": tmp_path})
    made = arm64.image(server, cache, arm64.WORDS)
    assert made.files["/lab/server"] == tmp_path / "program/server-arm64/server"


def test_flavours_but_cloud_load_what_a_root_disk_takes() -> None:
    for kernel in KERNELS.values():
        assert ("nvme" in kernel.boot_modules) == ("cloud" not in kernel.flavour)
