# SPDX-License-Identifier: LGPL-2.1-or-later

"""A pseudo-terminal with a program in its foreground."""

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.forked import forked

PATIENCE_SECONDS = 60.0
"""Time after which a program that has not answered is taken to hang."""


class Terminal:
    """A terminal on which a program is started; ``seen`` is the output so far.

    ``modes`` are the terminal's modes before the program, and after :meth:`end` those
    that it left.

    :param words: the program and its arguments, or a function to run in a fork
    :param is_own: whether it is the controlling terminal of the program's session
    :param size: columns and lines
    """

    def __init__(
        self,
        words: Sequence[str | Path] | Callable[[], int],
        *,
        is_own: bool = True,
        size: tuple[int, int] = (80, 24),
        **environ: str,
    ) -> None:
        self.fd, follower = pty.openpty()
        self.resize(*size)
        self.seen = ""
        self.modes = termios.tcgetattr(self.fd)
        # A read can end inside a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        streams = {"stdin": follower, "stdout": follower, "stderr": follower}
        # No pager, unless a test is about it.
        environ = {
            "TERM": "xterm-256color",
            "NO_COLOR": "",
            "MSA_PAGER": "",
            **environ,
        }
        self._process: subprocess.Popen[Any]
        if callable(words):
            work = words

            def copy() -> int:
                # Keep no second descriptor of the terminal, so that it hangs up.
                os.close(self.fd)
                # Restore the default: the tests can run under nohup.
                signal.signal(signal.SIGHUP, signal.SIG_DFL)
                if is_own:
                    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
                return work()

            self._process = forked(
                copy, environ=environ, start_new_session=True, **streams
            )
        else:
            self._process = subprocess.Popen(
                [
                    *("env", "--default-signal=HUP", "setsid"),
                    *(["--ctty"] if is_own else []),
                    *words,
                ],
                env={**os.environ, **environ},
                **streams,
            )
        os.close(follower)

    def resize(self, columns: int, lines: int) -> None:
        size = struct.pack("4H", lines, columns, 0, 0)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, size)

    def press(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def send(self, number: int) -> None:
        """Send a signal to the program."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Wait for the program to end; return the exit status."""
        return self._process.wait(PATIENCE_SECONDS)

    def wait_until_stopped(self) -> None:
        """Wait until a signal has stopped the program, reading its output meanwhile."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        options = os.WSTOPPED | os.WNOWAIT | os.WNOHANG
        while os.waitid(os.P_PID, self._process.pid, options) is None:
            assert time.monotonic() < deadline, "it is not stopped"
            if select.select([self.fd], [], [], 0.01)[0]:
                self._read(deadline)

    def read_until(
        self, pattern: str, start: int = 0, timeout: float = PATIENCE_SECONDS
    ) -> None:
        """Read until a pattern matches output after index *start* of ``seen``."""
        deadline = time.monotonic() + timeout
        while not re.search(pattern, self.seen[start:]):
            assert self._read(deadline), f"no {pattern!r} in {self.seen[start:]!r}"

    def end(self) -> int:
        """Read to the end; return the exit status, negative for a signal."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._read(deadline):
            pass
        status = self.wait()
        self.modes = termios.tcgetattr(self.fd)
        os.close(self.fd)
        return status

    def _read(self, deadline: float) -> bool:
        """Add output to ``seen``; return whether there can be more."""
        left = max(deadline - time.monotonic(), 0)
        if not select.select([self.fd], [], [], left)[0]:
            raise AssertionError(f"nothing more, and no end: {self.seen[-1000:]!r}")
        try:
            self.seen += self._decoder.decode(os.read(self.fd, 65536))
        except OSError:
            # The program has closed its side.
            return False
        return True
