# SPDX-License-Identifier: LGPL-2.1-or-later

"""What is said where /proc/kcore cannot be opened, and what to do about it.

Guests show the common cases (tests/live); these are files in place of the kernel's.
"""

import os
from pathlib import Path

import pytest

from msatools.target import TargetError, TargetSpec, kcore, open_target
from msatools.target import open as opening

DENIED = PermissionError(1, "Operation not permitted")
NO_CAPABILITIES = "CapEff:\t0000000000000000\n"
ALL_CAPABILITIES = "CapEff:\t000001ffffffffff\n"


def said() -> str:
    with pytest.raises(TargetError) as raised:
        open_target(TargetSpec())
    return str(raised.value).replace(opening.KCORE, "/proc/kcore")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory in place of /proc."""
    monkeypatch.setattr(opening, "_PROC", str(tmp_path))
    monkeypatch.setattr(opening, "KCORE", str(tmp_path / "kcore"))
    monkeypatch.setattr(opening, "_LOCKDOWN", str(tmp_path / "lockdown"))
    return tmp_path


@pytest.fixture
def denied(proc: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with a /proc/kcore that root, too, may not open."""

    def deny() -> None:
        raise DENIED

    (proc / "kcore").touch()
    (proc / "self").mkdir()
    (proc / "self/status").write_text("Name:\tmsa\n" + ALL_CAPABILITIES)
    monkeypatch.setattr(kcore, "open_kcore", deny)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return proc


def test_proc_is_not_mounted(proc: Path) -> None:
    assert said() == (
        "/proc/kcore: /proc is not mounted; mount it: mount -t proc proc /proc"
    )


def test_no_kcore(proc: Path) -> None:
    (proc / "self").mkdir()
    assert said() == (
        "/proc/kcore: no such file; this kernel or container offers none: name a dump "
        "instead"
    )


def test_something_else_in_its_place(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker mounts /dev/null over it."""
    monkeypatch.setattr(opening, "KCORE", "/dev/null")
    assert said() == (
        "/proc/kcore: something else is mounted over it, as in a container; run "
        "outside of the container"
    )


def test_not_root(denied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert said() == "/proc/kcore: permission denied; run as root"


@pytest.mark.parametrize("user", [0, 1000])
def test_lockdown(denied: Path, monkeypatch: pytest.MonkeyPatch, user: int) -> None:
    """To become root would not help."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    (denied / "lockdown").write_text("none integrity [confidentiality]\n")
    assert said() == (
        "/proc/kcore: the kernel is locked down (confidentiality); boot it without "
        "lockdown, or name a dump instead"
    )


@pytest.mark.parametrize("mode", ["[none] integrity", "none [integrity]"])
def test_lockdown_that_does_not_deny_it(denied: Path, mode: str) -> None:
    (denied / "lockdown").write_text(f"{mode} confidentiality\n")
    assert said() == (
        "/proc/kcore: permission denied, even to root; see if lockdown or a security "
        "module (LSM) of the kernel denies it"
    )


def test_root_of_a_container(denied: Path) -> None:
    (denied / "self/status").write_text("Name:\tmsa\n" + NO_CAPABILITIES)
    assert said() == (
        "/proc/kcore: permission denied, even to root; run outside of the container, "
        "with CAP_SYS_RAWIO"
    )


def test_something_that_drgn_does_not_know(
    denied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ValueError("not an ELF core file")

    monkeypatch.setattr(kcore, "open_kcore", fail)
    assert said() == (
        "/proc/kcore: drgn cannot open it: not an ELF core file; name a dump instead"
    )
