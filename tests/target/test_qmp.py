# SPDX-License-Identifier: LGPL-2.1-or-later

import socket
import threading
from pathlib import Path

import pytest

from fixtures import lab
from msatools.memory.memstat import collect_memstat
from msatools.selfdesc.finders import finders_of
from msatools.target import TargetError, TargetSpec, describe, open_target, qmp


def test_guest_that_runs(live_qmp: str, run_612: lab.Run) -> None:
    prog, target = open_target(TargetSpec(qemu=live_qmp, vmlinux=str(run_612.vmlinux)))
    assert target.path == live_qmp
    assert (target.kind, target.live, target.crash) == ("qmp", True, None)
    assert target.release == run_612.release
    before = prog["jiffies"].value_()
    while prog["jiffies"].value_() == before:
        pass
    assert describe(prog).kind == "qmp"


def test_guest_that_runs_without_debug_info(live_qmp: str, run_612: lab.Run) -> None:
    prog, target = open_target(TargetSpec(qemu=live_qmp, types="btf"))
    assert (target.kind, target.live, target.types) == ("qmp", True, "btf")
    assert prog["init_task"].comm.string_() == b"swapper/0"
    assert "loop" in [module.name for module in finders_of(prog).modules]
    report = collect_memstat(prog, target=target)
    assert report.coverage["unreadable_pages"] == 0
    assert report.pages == sum(count.pages for count in report.classes)


def test_socket_held_by_another_client(
    live_qmp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qmp, "_GREETING_TIMEOUT_S", 0.2)
    with qmp.connect(live_qmp), pytest.raises(TargetError, match="no answer"):
        qmp.connect(live_qmp)


def test_nobody_listens(tmp_path: Path) -> None:
    path = tmp_path / "qmp"
    with pytest.raises(TargetError, match="No such file"):
        open_target(TargetSpec(qemu=str(path)))
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with pytest.raises(TargetError, match="refused"):
        open_target(TargetSpec(qemu=str(path)))


@pytest.mark.parametrize("where", ["unix", "tcp"])
def test_another_protocol(tmp_path: Path, where: str) -> None:
    if where == "unix":
        server = socket.socket(socket.AF_UNIX)
        address = str(tmp_path / "qmp")
        server.bind(address)
    else:
        server = socket.socket()
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with server:
        server.listen()

        def greet() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"220 mail ESMTP\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(TargetError, match="not a QMP socket"):
            open_target(TargetSpec(qemu=address))
        thread.join()
