# SPDX-License-Identifier: LGPL-2.1-or-later
import os

import pytest

from fixtures.lab import host
from fixtures.lab.errors import LabError


def test_programs_that_are_there_need_nothing() -> None:
    host.require(["tar"])


def test_who_is_not_root_is_told_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "find", lambda program: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match=r"apt-get install e2fsprogs gcc libc6-dev$"):
        host.require(["gcc", "mke2fs"])


def test_failure_shows_what_the_program_said() -> None:
    with pytest.raises(LabError, match="exit status 3\nwhy"):
        host.run(["sh", "-c", "echo why >&2; exit 3"], timeout=10)


def test_program_that_hangs_is_ended() -> None:
    with pytest.raises(LabError, match="not done after 0 s"):
        host.run(["sleep", "60"], timeout=0.1)


def test_missing_program_is_named() -> None:
    with pytest.raises(LabError, match="no such program"):
        host.run(["no-such-program-here"], timeout=1)
