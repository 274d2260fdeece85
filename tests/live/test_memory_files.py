# SPDX-License-Identifier: LGPL-2.1-or-later

"""A guest's memory as QEMU itself writes it, in each form, of a stopped guest."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab.qmp import Qmp
from msatools.target import TargetSpec, open_target
from tests.target.raw import writers
from tests.target.raw.answers import answers

NAMED = "memstat", "prstat", "zombies", "cpus"
SECONDS = 120.0


def control(guest: lab.Live) -> Qmp:
    return guest.guest._control


def pmemsave(guest: lab.Live, path: Path, ranges: list[writers.Ram]) -> None:
    """Have QEMU save each range of RAM, at its address in the file."""
    part = guest.directory / "part"
    with path.open("wb") as out:
        for ram in ranges:
            control(guest).execute(
                "pmemsave",
                val=ram.start,
                size=ram.size,
                filename=str(part),
                timeout=SECONDS,
            )
            with part.open("rb") as file:
                for offset in range(0, ram.size, 1 << 20):
                    data = file.read(1 << 20)
                    if any(data):
                        out.seek(ram.start + offset)
                        out.write(data)
            part.unlink()
        out.truncate(ranges[-1].start + ranges[-1].size)


def migrate(guest: lab.Live, path: Path) -> None:
    """Have QEMU write its stream of migration to a file."""
    qmp = control(guest)
    qmp.execute("migrate-set-parameters", max_bandwidth=1 << 40)
    qmp.execute("migrate", uri=f"exec:cat > {path}")
    end_s = time.monotonic() + SECONDS
    while time.monotonic() < end_s:
        state: dict[str, Any] = qmp.execute("query-migrate")
        if state.get("status") == "completed":
            return
        assert state.get("status") != "failed", state
        time.sleep(0.2)
    pytest.fail(f"not migrated: {json.dumps(state)}")


@pytest.mark.live
def test_each_form(tmp_path: Path) -> None:
    with lab.live("memory-6.12") as guest:
        guest.guest.stop()
        dump = tmp_path / "elf"
        guest.guest.dump(dump)
        ranges = writers.ram_of(dump)
        pmemsave(guest, tmp_path / "pmemsave", ranges)
        migrate(guest, tmp_path / "migration")
    plain = writers.without(dump, tmp_path / "plain", b"CORE", b"QEMU")
    os.unlink(dump)
    expected = answers(plain, *NAMED)
    os.unlink(plain)
    for name, words in (
        ("pmemsave", "raw memory, 5.0 GiB, kernel found"),
        ("migration", "QEMU migration, 2.0 GiB, hole at 1 GiB, kernel found"),
    ):
        path = tmp_path / name
        found = open_target(TargetSpec(path=str(path), types="btf")).target
        assert found.format.startswith(words)
        assert answers(path, *NAMED) == expected, name
        os.unlink(path)
