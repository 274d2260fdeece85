# SPDX-License-Identifier: LGPL-2.1-or-later

"""The description of a crash is the one on the guest's console."""

import re

import pytest

from fixtures import lab
from msatools.program import Crash, TargetSpec, open_target


@pytest.mark.parametrize("kernel", ["6.1", "6.12"])
def test_crash_is_as_the_console_printed_it(kernel: str) -> None:
    run = lab.build(f"crash-{kernel}")
    target = open_target(
        TargetSpec(path=str(run.dump("vmcore")), vmlinux=str(run.vmlinux))
    ).target
    message = re.search(r"Kernel panic - .*", run.console)
    who = re.search(r"CPU: (\d+) .*?PID: (\d+) Comm: (\S+)", run.console)
    assert message
    assert who
    assert target.crash == Crash(
        message=message[0].rstrip(),
        cpu=int(who[1]),
        pid=int(who[2]),
        comm=who[3],
    )
