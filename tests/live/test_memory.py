# SPDX-License-Identifier: LGPL-2.1-or-later

"""Memory of a guest that runs, at rest: what it recorded is what is found."""

import re

from fixtures import lab
from msatools.memory.memstat import collect_memstat
from msatools.program import TargetSpec, open_target
from tests.conftest import Msa


def test_processes(live_guest: lab.Live, live_qmp: str) -> None:
    prog = open_target(TargetSpec(qemu=live_qmp, types="btf")).prog
    report = collect_memstat(prog, by=("process",))
    assert report.by is not None
    found = {group.key: group for group in report.by["process"]}
    for process in live_guest.workload["processes"]:
        text = live_guest.truth(f"proc/{process['pid']}/smaps_rollup").decode()
        match = re.search(r"^Rss: +(\d+) kB\nPss: +(\d+) kB$", text, re.MULTILINE)
        assert match
        group = found[str(process["pid"])]
        said = group.rss_pages * 4, group.pss_bytes >> 10
        assert said == (int(match[1]), int(match[2]))
    assert sum(group.pages for group in report.by["process"]) == report.pages


def test_several_workers_cannot_read_over_qmp(
    live_guest: lab.Live, live_qmp: str, msa: Msa
) -> None:
    guest = ("--qemu", live_qmp, "-s", live_guest.vmlinux)
    done = msa(*guest, "-j", "2")
    assert done.returncode == 2
    assert done.stderr.startswith("msa-memstat: -j 2: ")
    assert len(done.stderr.splitlines()) == 1
    assert msa(*guest, "-j", "1").returncode == 0
