# SPDX-License-Identifier: LGPL-2.1-or-later

"""Stacks of exited tasks that RCU is to free: there, and no longer counted."""

import numpy as np
from drgn.helpers.linux.pid import find_task

from fixtures.demo import DEMOS
from msatools.kernel.reader import Reader
from msatools.memory.areas import freed_stacks
from msatools.program import TargetSpec, open_target
from tests.support import overlay


def test_stacks_with_the_callback_are_counted() -> None:
    prog = open_target(TargetSpec(path=str(DEMOS["6.12"].core))).prog
    stacks = [int(find_task(prog, pid).stack) for pid in (1, 2)]
    starts = np.array(stacks, np.uint64)
    assert freed_stacks(Reader(prog), starts) == 0
    free = prog.symbol("thread_stack_free_rcu").address
    overlay.put(prog, stacks[0], bytes(8) + free.to_bytes(8, "little"))
    assert freed_stacks(Reader(prog), starts) == 1
