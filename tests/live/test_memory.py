# SPDX-License-Identifier: LGPL-2.1-or-later

"""Memory of a guest that runs, at rest: what it recorded is what is found."""

from fixtures import lab
from tests.conftest import Msa


def test_several_workers_cannot_read_over_qmp(
    live_guest: lab.Live, live_qmp: str, msa: Msa
) -> None:
    guest = ("--qemu", live_qmp, "-s", live_guest.vmlinux)
    done = msa(*guest, "-j", "2")
    assert done.returncode == 2
    assert done.stderr.startswith("msa-memstat: -j 2: ")
    assert len(done.stderr.splitlines()) == 1
    assert msa(*guest, "-j", "1").returncode == 0
