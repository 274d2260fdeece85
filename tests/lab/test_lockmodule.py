# SPDX-License-Identifier: LGPL-2.1-or-later
"""What the module says of its locks, held against the kernel's own structures."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures import lab
from fixtures.lab import headers, lockmodule
from fixtures.lab.errors import LabError
from fixtures.lab.guest import lockmodule as guest
from fixtures.lab.kernels import KERNELS, Installed

KERNEL_NAMES = ("6.1", "6.12")


@pytest.fixture(scope="module", params=KERNEL_NAMES)
def run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(f"lockmodule-{request.param}")


def text(run: lab.Run, pid: int, name: str) -> str:
    return run.truth(f"proc/{pid}/task/{pid}/{name}").decode()


def test_packages_are_of_the_release() -> None:
    kernel = Installed(KERNELS["6.1"], "6.1.0-9-cloud-amd64", "6.1.9-1", Path("/"))
    depends = ["linux-base", "linux-headers-6.1.0-9-common", "gcc-12"]
    found = headers.packages(kernel, [*depends, "linux-kbuild-6.1"])
    assert [str(package) for package in found] == [
        "linux-headers-6.1.0-9-cloud-amd64=6.1.9-1",
        "linux-headers-6.1.0-9-common=6.1.9-1",
        "linux-kbuild-6.1=6.1.9-1",
    ]
    with pytest.raises(LabError, match=r"no linux-headers-6\.1\.0-9-cloud-amd64 in"):
        headers.packages(kernel, depends)


def test_makefile_of_the_headers_finds_its_neighbour() -> None:
    found = headers.relative("include /usr/src/linux-headers-6.1-common/Makefile\n")
    assert found == (
        "include $(dir $(lastword $(MAKEFILE_LIST)))../"
        "linux-headers-6.1-common/Makefile\n"
    )
    place = headers.relative(
        "KBUILD_OUTPUT=/usr/src/linux-headers-7\ninclude /usr/src/x/Makefile\n"
    ).splitlines()[0]
    assert place == (
        "KBUILD_OUTPUT=$(dir $(lastword $(MAKEFILE_LIST)))../linux-headers-7"
    )
    with pytest.raises(LabError, match="includes nothing"):
        headers.relative("all:\n")


def test_scenarios_are_modes_of_the_module() -> None:
    source = (lockmodule.SOURCE / "main.c").read_text()
    assert set(guest.MODES) == set(lockmodule.SUMMARIES)
    assert [f"&lm_{mode}" for mode in guest.MODES.values()] == re.findall(
        r"&lm_\w+", source
    )


def test_there_are_locks_of_every_type(run: lab.Run) -> None:
    waiters = [one for lock in run.workload["locks"] for one in lock["waiters"]]
    for waiter in waiters:
        assert text(run, waiter["pid"], "comm").strip() == waiter["comm"]
    assert len(waiters) == 41
    assert {lock["type"] for lock in run.workload["locks"]} == {
        kind for kind, _ in lockmodule.FUNCTIONS
    }


def test_a_guest_whose_threads_do_not_wait_is_built_anew(run: lab.Run) -> None:
    lockmodule.check_waits(run)
    locks = run.workload["locks"]
    waits = {one["pid"] for lock in locks for one in lock["waiters"]}
    (idle, *_) = (one for one in run.workload["threads"] if one["pid"] not in waits)
    other = replace(run)
    for wrong in (
        [*locks, locks[0] | {"waiters": [idle | {"mode": None}]}],
        locks[1:],
    ):
        other.__dict__["workload"] = run.workload | {"locks": wrong}
        with pytest.raises(LabError, match="is not in lm_"):
            lockmodule.check_waits(other)
