# SPDX-License-Identifier: LGPL-2.1-or-later

"""Threads of programs that wait here as they are to in guests."""

import time

from fixtures.lab.guest import cases

SECONDS = 60
"""After which who does not wait hangs."""


def wait_until_in_class(pid: int, tid: int, name: str) -> None:
    """Wait until a thread is in a state in which those of a class may be."""
    until = time.monotonic() + SECONDS
    while cases.state_of(pid, tid) not in cases.LOOKS[name][0]:
        assert time.monotonic() < until
        time.sleep(0.01)
