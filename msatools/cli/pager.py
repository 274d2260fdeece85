# SPDX-License-Identifier: LGPL-2.1-or-later

"""A pager for what is longer than the screen, as git has one."""

import io
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from msatools.cli.output import is_terminal
from msatools.render import show
from msatools.render.blocks import Block
from msatools.render.device import Device, terminal_size

if TYPE_CHECKING:
    import subprocess

_LESS = "FRX"
"""Options of less, unless LESS is set: end at once if all fits (F), show colours (R),
leave the screen as it is (X)."""

_NO_PAGER = ("", "cat")
_NOT_FOUND = (126, 127)
"""Exit statuses of a shell that could not run a program (sh(1))."""

_PATIENCE_S = 2.0
"""Time that a pager has to end after SIGTERM."""


def show_paged(blocks: Iterable[Block], out: TextIO, device: Device) -> None:
    """Print the blocks of one report, with a pager where it is usable and needed."""
    if not is_usable(out):
        show(blocks, out, device)
        return
    text = io.StringIO()
    show(blocks, text, device)
    page(text.getvalue(), out)


def is_usable(out: TextIO) -> bool:
    """Return whether a stream is a terminal with this process in its foreground."""
    from msatools.cli.sandbox import is_locked_down
    from msatools.cli.screen import is_in_front

    if not is_terminal(out) or os.environ.get("TERM", "dumb") == "dumb":
        return False
    # In the sandbox the parent has the terminal, and pages.
    return not is_locked_down() and is_in_front(out) and bool(_command())


def page(text: str, out: TextIO) -> None:
    """Print a text, by a pager if it has more lines than the screen.

    Ctrl-C is the pager's, and one that ends before the text does is quiet.
    """
    command = _command()
    # The prompt takes a line.
    if text.count("\n") < terminal_size(out).lines or command is None:
        out.write(text)
        return
    out.flush()
    if not _run(command, text):
        out.write(text)


def _command() -> str | None:
    """Return the pager as a line for the shell; ``None`` if there is none."""
    for name in ("MSA_PAGER", "PAGER"):
        if (wanted := os.environ.get(name)) is not None:
            return None if wanted.strip() in _NO_PAGER else wanted
    return "less" if shutil.which("less") else None


def _run(command: str, text: str) -> bool:
    """Show a text by a pager; return whether it could be run."""
    import subprocess
    import termios

    modes = None
    with suppress(OSError, ValueError, termios.error):
        modes = termios.tcgetattr(sys.stdout.fileno())
    environ = {"LESS": _LESS, "LV": "-c", **os.environ}
    # What is ignored is so in the program, too; a handler is not.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with subprocess.Popen(
            command, shell=True, stdin=subprocess.PIPE, env=environ
        ) as process:
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            with _ended_with_us(process, modes):
                # It may end before it has read everything.
                process.communicate(text.encode(encoding, "backslashreplace"))
            status = process.returncode
    finally:
        signal.signal(signal.SIGINT, before)
    return status not in _NOT_FOUND


@contextmanager
def _ended_with_us(
    process: "subprocess.Popen[bytes]", modes: list[Any] | None
) -> Iterator[None]:
    """End the pager if a signal ends us, and restore the terminal's modes.

    A pager that has the keyboard would go on, and share it with the shell.

    :param modes: The modes before the pager began; ``None`` if unknown.
    """
    import subprocess
    import termios

    try:
        yield
    except BaseException:
        # The shell passes no signal on, and ends when what it has started does.
        _send([*_descendants(process.pid)] or [process.pid], signal.SIGTERM)
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            _send([process.pid, *_descendants(process.pid)], signal.SIGKILL)
        if modes is not None:
            with suppress(termios.error):
                termios.tcsetattr(sys.stdout.fileno(), termios.TCSANOW, modes)
        raise


def _descendants(pid: int) -> Iterator[int]:
    """Yield the processes that a process has started, and those that they have."""
    with suppress(OSError):
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = [int(word) for word in file.read().split()]
        for child in children:
            yield child
            yield from _descendants(child)


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)
