# SPDX-License-Identifier: LGPL-2.1-or-later

"""Signals that ask a command to end."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn


class Stopped(BaseException):
    """A signal asks the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def stop_on_signals() -> Iterator[list[int]]:
    """Raise :class:`Stopped` at a signal, and give the list of those that came.

    drgn swallows what is raised while it imports its plugins; the list keeps it.
    """
    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        came.append(number)
        raise Stopped(number)

    # What the parent ignores, as nohup does, stays ignored.
    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_by(number: int) -> int:
    """End the process by a signal, so that its parent sees which."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    # Not reached, unless the signal is blocked: then as a shell would count it.
    return 128 + number
