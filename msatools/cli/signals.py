# SPDX-License-Identifier: LGPL-2.1-or-later

"""Signals that ask a command to end."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import ClassVar


class Stopped(BaseException):
    """A signal asks the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


_PATIENCE_S = 10.0
"""How long a signal waits for the end of what is not to be cut in two: a sample of
20,000 tasks takes a second to print, and nobody may read it."""


_AGAIN_S = 0.02
"""How long after a signal that drgn has swallowed it is raised again."""


class _State:
    """What signals there were, and whether one has to wait."""

    came: ClassVar[list[int]] = []
    has_to_wait = False


@contextlib.contextmanager
def stop_on_signals() -> Iterator[list[int]]:
    """Raise :class:`Stopped` at a signal, and give the list of those that came.

    drgn swallows what is raised while it calls plugins: it is raised again a little
    later, and the list keeps it.
    """
    came = _State.came = []
    hook = sys.unraisablehook

    def swallowed(unraisable: "sys.UnraisableHookArgs") -> None:
        if isinstance(unraisable.exc_value, Stopped):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        else:
            hook(unraisable)

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if not _State.has_to_wait or len(came) > 1:
            raise Stopped(number)
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S)

    def stop_at_last(number: int, frame: FrameType | None) -> None:
        if came:
            raise Stopped(came[0])

    # What the parent ignores, as nohup does, stays ignored.
    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, stop) for number in numbers}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, stop_at_last)
    sys.unraisablehook = swallowed
    try:
        yield came
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = hook
        _State.came = []
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """Do something to its end, or for some seconds more, where a signal comes.

    A second signal does not wait.
    """
    _State.has_to_wait = True
    try:
        yield
    finally:
        _State.has_to_wait = False
        signal.setitimer(signal.ITIMER_REAL, 0)
    stop_if_told()


def stop_if_told() -> None:
    """Stop if a signal came, whatever has become of what it raised."""
    if _State.came:
        raise Stopped(_State.came[0])


@contextlib.contextmanager
def told_first() -> Iterator[None]:
    """Raise a signal first where a library made another exception of it.

    numpy does so where a signal comes while it compares types.
    """
    try:
        yield
    except Exception:
        stop_if_told()
        raise


def end_by(number: int) -> int:
    """End the process by a signal, so that its parent sees which."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    # Not reached, unless the signal is blocked: then as a shell would count it.
    return 128 + number
