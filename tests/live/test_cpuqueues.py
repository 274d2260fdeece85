# SPDX-License-Identifier: LGPL-2.1-or-later

"""Run queues and processors of a guest that goes on while we look."""

import time

from drgn import ProgramFlags

from fixtures import lab
from msatools.cpus.cpus import doing
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.program import TargetSpec, open_target
from msatools.tasks.text import KernelText
from tests.cpus.queuedumps import all_of, look_at

SAMPLES = 5
PATIENCE_SECONDS = 600
"""In which an idle guest has some timer, however slow it is."""


def test_a_guest_that_runs_is_told_of_again_and_again(
    live_qmp: str, run_612: lab.Run
) -> None:
    prog, _ = open_target(TargetSpec(qemu=live_qmp, types="btf"))
    assert prog.flags & ProgramFlags.IS_LIVE
    text = KernelText(Reader(prog), LossLog())
    clocks: list[int] = []
    end = time.monotonic() + PATIENCE_SECONDS
    # An idle guest's clocks stand between its timers.
    while len(clocks) < SAMPLES or clocks[-1] == clocks[0]:
        assert time.monotonic() < end
        found = look_at(prog, run_612)
        assert [queue.cpu for queue in found.queues] == [0, 1]
        for queue in found.queues:
            assert queue.current is not None
            assert queue.lag_ns is not None
            pids = [task.pid for task in all_of(queue) if task.pid]
            assert len(pids) == len(set(pids))
            assert doing(prog, text, queue.cpu, LossLog()) is None
        assert [p.hotplug for p in found.processors] == ["online", "online"]
        assert not found.losses.lost
        clocks.append(max(queue.clock_ns for queue in found.queues))
    assert clocks == sorted(clocks)
