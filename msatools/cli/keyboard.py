# SPDX-License-Identifier: LGPL-2.1-or-later

"""The keys pressed on the terminal."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from typing import Any, TextIO

from msatools.cli.output import is_terminal


def is_in_front(stream: TextIO | None) -> bool:
    """Tell whether a stream is a terminal, ours, and we are in its foreground."""
    if not is_terminal(stream):
        return False
    assert stream is not None
    try:
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except OSError:
        # The terminal of another session.
        return False


_AT_MOST_S = 1.0
"""One wait: a signal that comes just before it begins does not end it."""


class Keys:
    """The keys pressed on the terminal, if there is one and it is ours."""

    def __init__(self) -> None:
        self._saved: list[Any] | None = None

    def take(self) -> None:
        """Have each key as it is pressed."""
        # A pipe's reader, such as less, may want the keys for itself.
        if is_terminal(sys.stdout) and is_in_front(sys.stdin):
            self._fd = sys.stdin.fileno()
            with contextlib.suppress(termios.error):
                saved = termios.tcgetattr(self._fd)
                tty.setcbreak(self._fd, termios.TCSADRAIN)
                self._saved = saved

    def give_back(self) -> None:
        """Leave the terminal as it was."""
        if self._saved is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._saved)
            self._saved = None

    @property
    def are_ours(self) -> bool:
        """Whether keys are seen at all."""
        return self._saved is not None

    def quit_before(self, due_s: float) -> bool:
        """Wait until a moment of the monotonic clock; tell whether ``q`` came first.

        A key that was pressed while something else was done counts as well.
        """
        while True:
            left_s = due_s - time.monotonic()
            if self._saved is None:
                if left_s <= 0:
                    return False
                time.sleep(min(left_s, _AT_MOST_S))
            elif select.select([self._fd], [], [], max(min(left_s, _AT_MOST_S), 0))[0]:
                if os.read(self._fd, 1) in (b"q", b"Q", b""):
                    return True
            elif left_s <= 0:
                return False
