# SPDX-License-Identifier: LGPL-2.1-or-later

"""Dumps of each kernel, opened with debug info and with what they carry themselves."""

from typing import NamedTuple

import pytest
from drgn import Program

from fixtures import lab
from msatools.program import TargetSpec, open_target


class Pair(NamedTuple):
    """One dump, and the two ways to see it."""

    run: lab.Run
    dwarf: Program
    btf: Program


def open_pair(run: lab.Run, format: str = "elf") -> Pair:
    path = str(run.dump(format))
    return Pair(
        run,
        open_target(TargetSpec(path=path, vmlinux=str(run.vmlinux))).prog,
        open_target(TargetSpec(path=path, types="btf")).prog,
    )


@pytest.fixture(scope="session", params=["5.10", "6.1", "6.12"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return open_pair(lab.build(f"memory-{request.param}"))


@pytest.fixture(scope="session", params=["6.1", "6.12"])
def crash_pair(request: pytest.FixtureRequest) -> Pair:
    return open_pair(lab.build(f"crash-{request.param}"), "vmcore")
