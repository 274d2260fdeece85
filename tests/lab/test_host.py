# SPDX-License-Identifier: LGPL-2.1-or-later
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from fixtures.lab import host
from fixtures.lab.errors import LabError, UnavailableError


def test_programs_that_are_there_need_nothing() -> None:
    host.require(["tar"])


def test_who_is_not_root_is_told_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "find", lambda program: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    message = r"apt-get install e2fsprogs gcc libc6-dev$"
    with pytest.raises(UnavailableError, match=message):
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


@pytest.fixture
def apt(tmp_path: Path) -> dict[str, str]:
    """The environment of an apt without sources, whose state is in *tmp_path*."""
    if not shutil.which("apt-get"):
        pytest.skip("needs apt")
    for name in ("etc", "lists/partial", "archives/partial"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "status").touch()
    configuration = tmp_path / "apt.conf"
    configuration.write_text(
        f"""
        Dir::Etc "{tmp_path}/etc";
        Dir::State "{tmp_path}";
        Dir::State::lists "{tmp_path}/lists";
        Dir::State::status "{tmp_path}/status";
        Dir::Cache "{tmp_path}";
        """
    )
    return {**os.environ, "APT_CONFIG": str(configuration)}


HOLDER = """
import fcntl, sys
with open(sys.argv[1], "w") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX)
    print(flush=True)
    sys.stdin.read()
"""
"""A program that holds a lock until its input ends, as others than the lab do."""


@contextmanager
def held(lock: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Have another process hold a lock of apt; it ends with the block at the latest."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOLDER, str(lock)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield holder


def test_locks_of_apt_are_waited_for(
    apt: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    lock = tmp_path / "lists/lock"
    with held(lock) as holder:

        def sleep(seconds: float) -> None:
            """The other program ends while the lab waits the second time."""
            waits.append(seconds)
            if len(waits) == 2:
                holder.communicate()

        waits: list[float] = []
        # Not the module's own: waiting for a process sleeps as well.
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
        monkeypatch.setattr(host, "time", clock)
        host.run_apt(["apt-get", "update"], timeout=60, env=apt)
    assert waits == [host.LOCK_POLL_SECONDS] * 2
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("lab: waiting up to 300 s for apt: Could not get lock")
    assert str(lock) in said[0]
    assert f"held by process {holder.pid}" in said[0]


def test_locks_of_apt_are_not_waited_for_without_end(
    apt: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr(host, "LOCK_POLL_SECONDS", 0.1)
    with held(tmp_path / "lists/lock"), pytest.raises(LabError, match="gave up after"):
        host.run_apt(["apt-get", "update"], timeout=60, env=apt)


def test_package_that_cannot_be_had_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Sequence[str]] = []

    def install(names: Sequence[str]) -> None:
        asked.append(names)
        raise LabError("E: Unable to locate package nothing-of-this-name")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(host, "_install", install)
    monkeypatch.setattr(host, "_FAILED", {})
    for _ in range(2):
        with pytest.raises(
            UnavailableError, match="missing on this machine: a; apt cannot"
        ):
            host.install(["a"], {"nothing-of-this-name"})
    assert asked == [["nothing-of-this-name"]]
