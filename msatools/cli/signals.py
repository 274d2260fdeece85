# SPDX-License-Identifier: LGPL-2.1-or-later

"""Signals that stop a command."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import ClassVar


class Stopped(BaseException):
    """A signal stops the command."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


_PATIENCE_S = 10.0
"""Maximum time that a signal waits for the end of :func:`whole`: a sample of 20,000
tasks takes a second to print, and its reader may be blocked."""


_AGAIN_S = 0.02
"""Time after which a signal swallowed by drgn is raised again."""


class _State:
    """The signals received so far, and whether they have to wait."""

    came: ClassVar[list[int]] = []
    has_to_wait = False


@contextlib.contextmanager
def stop_on_signals() -> Iterator[list[int]]:
    """Raise :class:`Stopped` at a signal, and yield the list of received signals.

    drgn swallows exceptions while it calls plugins: so the signal is kept in the list,
    and raised again a little later.
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

    # A signal that the parent ignores, as nohup does, stays ignored.
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
    """Delay a signal until the end of the block, or for some seconds at most.

    A second signal is not delayed.
    """
    _State.has_to_wait = True
    try:
        yield
    finally:
        _State.has_to_wait = False
        signal.setitimer(signal.ITIMER_REAL, 0)
    stop_if_told()


def stop_if_told() -> None:
    """Raise :class:`Stopped` if a signal was received, even if it was swallowed."""
    if _State.came:
        raise Stopped(_State.came[0])


@contextlib.contextmanager
def told_first() -> Iterator[None]:
    """Raise :class:`Stopped` if a library converted it to another exception.

    numpy does so if a signal arrives while it compares types.
    """
    try:
        yield
    except Exception:
        stop_if_told()
        raise


def end_by(number: int) -> int:
    """End the process by a signal, so that its parent sees it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    # Reached only if the signal is blocked: then the status that a shell would use.
    return 128 + number
