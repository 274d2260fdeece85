# SPDX-License-Identifier: LGPL-2.1-or-later

"""Writing to standard output, the terminal and files; signals that end a command."""

import contextlib
import io
import os
import signal
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, ClassVar, TextIO

if TYPE_CHECKING:
    from argparse import Namespace

    from msatools.kernel.report import Progress
    from msatools.render.blocks import Block
    from msatools.render.device import Device
    from msatools.render.terminal import Drawing

# --- Writing to standard output, the terminal and files, with readable errors.


_MAX_LINKS = 40
"""Maximum symbolic links to follow, as in the kernel (MAXSYMLINKS)."""

_FAILING = ("strict", "surrogateescape")
"""Error handlers of Python's standard output (the second in locale C) that raise an
exception for a character that the encoding lacks."""


class OutputError(Exception):
    """Output could not be written."""


class OutputClosed(Exception):
    """The reader of the output has closed it."""


@contextlib.contextmanager
def output() -> Iterator[TextIO]:
    """Yield the current standard output, and distinguish its errors from others.

    :raises OutputError: if it could not be written
    :raises OutputClosed: if its reader has closed it
    """
    if sys.stdout is None:
        raise OutputError("standard output: closed; give the command one")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in _FAILING:
        # A name in a dump may have characters that the terminal cannot show.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError as error:
        _abandon_output()
        raise OutputClosed from error
    except OSError as error:
        _abandon_output()
        why = error.strerror or str(error)
        raise OutputError(f"standard output: {why}; print it elsewhere") from error


def _abandon_output() -> None:
    """Let Python's flush at exit succeed, by redirecting it to /dev/null."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is an open terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        # The stream is closed.
        return False


def device(args: "Namespace", out: TextIO) -> "Device":
    """Return the device of a stream, with the options ``--color`` and ``-v``."""
    from msatools.render.device import device_of

    return device_of(out, args.color, full=args.verbose)


def print_blocks(blocks: "Iterable[Block]", out: TextIO, args: "Namespace") -> None:
    """Print one report as text; on a terminal, with a pager if it is long."""
    look = device(args, out)
    # Inside drgn there is no pager: its prompt has pipes.
    if is_terminal(out) and not getattr(args, "no_pager", True):
        from msatools.cli.screen import show_paged

        show_paged(blocks, out, look)
    else:
        from msatools.render.device import show

        show(blocks, out, look)


class StatusLine:
    """A line on a terminal that is rewritten, and erased in the end.

    Only the bar is rich's. rich's own display hides and moves the cursor: the sandbox
    allows neither, and a killed process would leave the cursor hidden.

    :param out: Nothing is written if it is not a terminal.
    """

    def __init__(self, out: TextIO | None) -> None:
        self._out = out if is_terminal(out) else None
        self._drawing: Drawing | None = None

    def write(self, words: str, done: int, total: int, after: str = "") -> None:
        """Write words, a progress bar, and the text *after*."""
        if self._out is None:
            return
        if self._drawing is None:
            from msatools.render.device import device_of
            from msatools.render.terminal import Drawing

            self._drawing = Drawing(device_of(self._out))
        self._put(f"\r{words} {self._drawing.bar(done, total)}{after}\x1b[K")

    def add(self, line: str) -> None:
        """Write a permanent line above the status line."""
        self._put(f"\r{line}\x1b[K\n")

    def erase(self) -> None:
        """Erase the line, if it was written."""
        if self._drawing is not None:
            self._put("\r\x1b[K")

    def _put(self, text: str) -> None:
        if self._out is not None:
            self._out.write(text)
            self._out.flush()


class ProgressLine:
    """A status line on the progress of a collection, after a second of waiting."""

    _PATIENCE_S = 1.0
    _REDRAW_S = 0.1

    def __init__(self, name: str, out: TextIO) -> None:
        self._name = name
        self._line = StatusLine(out)
        self._next = time.monotonic() + self._PATIENCE_S

    def __enter__(self) -> "Progress":
        return self._update

    def __exit__(self, *exc_info: object) -> None:
        self._line.erase()

    def _update(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._REDRAW_S
            percent = f" {100 * done // max(total, 1)} %"
            self._line.write(f"{self._name}:", done, total, percent)


def check_writable(path: str) -> None:
    """Check that a file can be written, before its contents are computed.

    :raises OutputError: if it cannot be written
    """
    target = _followed(path)
    if target.exists() and not target.is_file():
        # Root must not replace /dev/null.
        what = "a directory" if target.is_dir() else "no regular file"
        raise OutputError(f"{path}: {what}; name a file")
    folder = target.parent
    if not folder.is_dir():
        raise OutputError(f"{path}: no such directory; make it, or name another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{path}: its directory is not writable; name another")


def replace_file(path: str, data: bytes) -> None:
    """Replace a file atomically: readers see the old or the new contents.

    A file of this user keeps its mode.

    :raises OutputError: if it cannot be written
    """
    check_writable(path)
    target = _followed(path)
    part = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
    try:
        with part.open("xb") as file:
            file.write(data)
            mode = _mode_to_keep(target)
            if mode is not None:
                os.fchmod(file.fileno(), mode)
        part.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        why = error.strerror or str(error)
        raise OutputError(f"{path}: {why}; write it elsewhere") from error


def _followed(path: str) -> Path:
    """Return the path, with symbolic links of this user followed.

    In a shared directory, such as /tmp, anyone can place a link to another file.

    :raises OutputError: if a link belongs to another user, or there are too many
    """
    target = Path(path)
    for _ in range(_MAX_LINKS):
        target = target.parent.resolve() / target.name
        if not target.is_symlink():
            return target
        if target.lstat().st_uid != os.geteuid():
            raise OutputError(f"{path}: a link of another user; name a file")
        target = target.parent / target.readlink()
    raise OutputError(f"{path}: too many links; name a file")


def _mode_to_keep(target: Path) -> int | None:
    """Return the mode of a file that this user owns; ``None`` for any other."""
    try:
        status = target.lstat()
    except FileNotFoundError:
        return None
    is_own = status.st_uid == os.geteuid()
    return stat.S_IMODE(status.st_mode) if is_own else None


# --- Signals that stop a command.


class Stopped(BaseException):
    """A signal stops the command."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


_PATIENCE_S = 10.0
"""Maximum delay of a signal by :func:`whole`: printing a sample of 20,000 tasks takes a
second, and the reader of the output may be blocked."""


_AGAIN_S = 0.02
"""Time after which a signal swallowed by drgn is raised again."""


class _State:
    """The signals received so far, and whether :func:`whole` delays them."""

    came: ClassVar[list[int]] = []
    has_to_wait = False


@contextlib.contextmanager
def stop_on_signals() -> Iterator[list[int]]:
    """Raise :class:`Stopped` at a signal, and yield the list of received signals.

    drgn swallows exceptions raised while it calls plugins: so the signal is kept in the
    list, and Stopped is raised again a little later.
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
    """Raise :class:`Stopped` if a signal was received, even if drgn swallowed it."""
    if _State.came:
        raise Stopped(_State.came[0])


@contextlib.contextmanager
def told_first() -> Iterator[None]:
    """Raise :class:`Stopped` if a library converted it to another exception.

    numpy converts it if a signal arrives while numpy compares types.
    """
    try:
        yield
    except Exception:
        stop_if_told()
        raise


def end_by(number: int) -> int:
    """End the process by a signal, so that the parent sees the signal."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    # Reached only if the signal is blocked: then the status that a shell would use.
    return 128 + number
