# SPDX-License-Identifier: LGPL-2.1-or-later

"""Errors for a /proc/kcore that cannot be opened, and their advice.

The common cases are tested in guests (tests/live); here, files replace the kernel's.
"""

import os
from pathlib import Path

import pytest

from msatools.program import TargetError, TargetSpec, live, open_target
from msatools.program import open as opening
from msatools.selfdesc.find import ask
from tests.support.golden import Golden

DENIED = PermissionError(1, "Operation not permitted")
NO_CAPABILITIES = "CapEff:\t0000000000000000\n"
ALL_CAPABILITIES = "CapEff:\t000001ffffffffff\n"


def error() -> str:
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
    """The same with a /proc/kcore that even root may not open."""

    def deny() -> None:
        raise DENIED

    (proc / "kcore").touch()
    (proc / "self").mkdir()
    (proc / "self/status").write_text("Name:\tmsa\n" + ALL_CAPABILITIES)
    monkeypatch.setattr(live, "open_kcore", deny)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return proc


def test_proc_is_not_mounted(proc: Path) -> None:
    assert error() == (
        "/proc/kcore: /proc is not mounted; mount it: mount -t proc proc /proc"
    )


def test_no_kcore(proc: Path) -> None:
    (proc / "self").mkdir()
    assert error() == (
        "/proc/kcore: no such file; this kernel or container offers none: name a dump "
        "instead"
    )


def test_something_else_in_its_place(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker mounts /dev/null over /proc/kcore."""
    monkeypatch.setattr(opening, "KCORE", "/dev/null")
    assert error() == (
        "/proc/kcore: something else is mounted over it, as in a container; run "
        "outside of the container"
    )


def test_golden_denied(
    denied: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    """The advice to become root is omitted if the kernel is locked down."""
    locked, lines = "none integrity [confidentiality]", []
    for user, lockdown, capabilities in (
        (1000, None, ALL_CAPABILITIES),
        (0, locked, ALL_CAPABILITIES),
        (1000, locked, ALL_CAPABILITIES),
        (0, "[none] integrity confidentiality", ALL_CAPABILITIES),
        (0, "none [integrity] confidentiality", ALL_CAPABILITIES),
        (0, None, NO_CAPABILITIES),
    ):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        (denied / "lockdown").unlink(missing_ok=True)
        if lockdown:
            (denied / "lockdown").write_text(f"{lockdown}\n")
        (denied / "self/status").write_text("Name:\tmsa\n" + capabilities)
        lines += [f"user {user}, {capabilities.strip()}, lockdown {lockdown}:", error()]
    golden("kcore-denied", lines)


def test_kcore_that_drgn_rejects(denied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reject() -> None:
        raise ValueError("not an ELF core file")

    monkeypatch.setattr(live, "open_kcore", lambda: ask(reject))
    assert error() == (
        "/proc/kcore: drgn cannot open it: ValueError: not an ELF core file; "
        "name a dump instead"
    )
