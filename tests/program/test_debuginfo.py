# SPDX-License-Identifier: LGPL-2.1-or-later

"""Debug info is found by name or debuginfod, and must match the kernel."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from drgn import Program

from fixtures import lab
from msatools.program import TargetError, TargetSpec, description, formats, open_target
from msatools.program.formats import reader_of
from msatools.program.model import NoTypesError, WrongBuildError
from tests.support.madeelf import BUILD_ID, image


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Start a debuginfod server; yield the paths that are requested from it."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("DEBUGINFOD_URLS", f"http://127.0.0.1:{server.server_port}")
        # The client caches misses for ten minutes.
        monkeypatch.setenv("DEBUGINFOD_CACHE_PATH", str(tmp_path))
        yield paths
        server.shutdown()


def open_without_build_id(run: lab.Run, release: str) -> Program:
    """Open a dump as if its kernel were older than 5.9, without BUILD-ID.

    :param release: release to put into VMCOREINFO
    """
    prog = Program()
    prog.set_core_dump(run.elf)
    note = prog["VMCOREINFO"].string_().decode()
    lines = [line for line in note.splitlines() if not line.startswith("BUILD-ID")]
    note = "\n".join([*lines, ""]).replace(run.release, release)
    older = Program(vmcoreinfo=note.encode())
    older.set_core_dump(run.elf)
    return older


def test_vmlinux_of_another_build(run_612: lab.Run, tmp_path: Path) -> None:
    other = tmp_path / "vmlinux"
    other.write_bytes(image(kind=2))
    with pytest.raises(WrongBuildError, match="another build") as caught:
        open_target(TargetSpec(path=str(run_612.elf), vmlinux=str(other)))
    assert caught.value.what == str(other)
    assert f"the file's: {BUILD_ID.hex()})" in str(caught.value)


def test_kernel_without_build_id(run_612: lab.Run) -> None:
    prog = open_without_build_id(run_612, run_612.release)
    description.load_named(prog, str(run_612.vmlinux))
    assert prog["linux_banner"].string_().startswith(b"Linux version")


def test_vmlinux_of_another_build_without_build_id(run_612: lab.Run) -> None:
    """The banner at the debug info's address names another release."""
    prog = open_without_build_id(run_612, "6.12.1-other")
    with pytest.raises(WrongBuildError, match="another build"):
        description.load_named(prog, str(run_612.vmlinux))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "ends before"),
        (b"\x7fELF", "ends before"),
        (b"hello, world\n" * 10, "not an ELF file"),
    ],
)
def test_file_that_is_not_a_vmlinux(
    run_612: lab.Run, tmp_path: Path, content: bytes, why: str
) -> None:
    path = tmp_path / "vmlinux"
    path.write_bytes(content)
    with pytest.raises(TargetError, match=why) as caught:
        open_target(TargetSpec(path=str(run_612.elf), vmlinux=str(path)))
    assert caught.value.what == str(path)


def test_vmlinux_that_does_not_exist(run_612: lab.Run, tmp_path: Path) -> None:
    for path, why in ((tmp_path, "directory"), (tmp_path / "vmlinux", "no such file")):
        with pytest.raises(TargetError, match=why):
            open_target(TargetSpec(path=str(run_612.elf), vmlinux=str(path)))


def test_stripped_vmlinux(run_612: lab.Run, tmp_path: Path) -> None:
    """Its build ID is found through the program headers."""
    stripped = tmp_path / "vmlinux"
    with run_612.vmlinux.open("rb") as file:
        read = reader_of(file.fileno())
        build_id = formats.build_id(read, formats.parse_elf(read))
    assert build_id
    stripped.write_bytes(image(kind=2, build_id=build_id))
    with pytest.raises(NoTypesError, match="no debug info"):
        open_target(TargetSpec(path=str(run_612.elf), vmlinux=str(stripped)))


def test_no_debug_info_found(run_612: lab.Run, requested: list[str]) -> None:
    with pytest.raises(NoTypesError, match="no debug info found") as caught:
        open_target(TargetSpec(path=str(run_612.elf), types="dwarf"))
    assert f"linux-image-{run_612.release}-dbg" in caught.value.what_to_do
    assert requested == []


@pytest.mark.parametrize("release", ["../../../../tmp", "..", ".", "6.12 x", "a/b"])
def test_release_that_leads_elsewhere(release: str, run_612: lab.Run) -> None:
    """drgn tries /lib/modules/RELEASE/vmlinux, wherever a dump says that is."""
    assert not is_looked_for(open_without_build_id(run_612, release))


def test_release_that_is_a_name(run_612: lab.Run) -> None:
    assert is_looked_for(open_without_build_id(run_612, "6.12.0+deb12~bpo1-amd64"))


def is_looked_for(prog: Program) -> bool:
    """Return whether drgn is asked for debug info of the kernel proper."""
    looked: list[str] = []
    prog.register_debug_info_finder(
        "spy",
        lambda modules: looked.extend(module.name for module in modules),
        enable_index=0,
    )
    prog.set_enabled_debug_info_finders(["spy"])
    assert not description.load_found(prog, debuginfod=False)
    return bool(looked)


def test_debuginfod_is_asked_if_requested(
    run_612: lab.Run, requested: list[str]
) -> None:
    open_target(TargetSpec(path=str(run_612.elf), debuginfod=True))
    assert requested
    assert all(path.startswith("/buildid/") for path in requested)


def test_debuginfod_without_a_server(
    run_612: lab.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DEBUGINFOD_URLS", raising=False)
    with pytest.raises(TargetError, match="DEBUGINFOD_URLS"):
        open_target(TargetSpec(path=str(run_612.elf), debuginfod=True))
