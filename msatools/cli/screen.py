# SPDX-License-Identifier: LGPL-2.1-or-later

"""Display of samples, appended or redrawn in place, and keys; and the pager."""

import contextlib
import io
import os
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
import tty
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, TextIO, cast

from msgspec.structs import replace

from msatools.cli.output import OutputClosed, OutputError, is_terminal, output
from msatools.kernel.report import Cost, R
from msatools.render.blocks import Block, Span, cut_line, line
from msatools.render.device import Device, show, terminal_size
from msatools.reports import forms
from msatools.reports.units import size

if TYPE_CHECKING:
    from rich.live import Live

    from msatools.cli.live_view import LiveView
    from msatools.render.terminal import Drawing, Row

# --- A pager for output longer than the screen, as in git.


_LESS = "FRX"
"""Options of less, unless LESS is set: end at once if all fits (F), show colours (R),
leave the screen as it is (X)."""

_NO_PAGER = ("", "cat")
_NOT_FOUND = (126, 127)
"""Exit statuses of a shell if it cannot run a program (sh(1))."""

_PATIENCE_S = 2.0
"""Maximum time to wait for a pager to end after SIGTERM."""


def show_paged(blocks: Iterable[Block], out: TextIO, device: Device) -> None:
    """Print the blocks of one report, by a pager if it is usable and needed."""
    if not is_usable(out):
        show(blocks, out, device)
        return
    text = io.StringIO()
    show(blocks, text, device)
    page(text.getvalue(), out)


def is_usable(out: TextIO) -> bool:
    """Return whether a pager can be used on a stream: a terminal in our control."""
    from msatools.cli.sandbox import is_locked_down

    if not is_terminal(out) or os.environ.get("TERM", "dumb") == "dumb":
        return False
    # In the sandbox, the parent has the terminal and starts the pager.
    return not is_locked_down() and is_in_front(out) and bool(_command())


def page(text: str, out: TextIO) -> None:
    """Print a text, by a pager if it has more lines than the screen.

    Ctrl-C goes to the pager; no error is raised if the pager quits early.
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
    """Return the shell command line of the pager; ``None`` if there is none."""
    for name in ("MSA_PAGER", "PAGER"):
        if (wanted := os.environ.get(name)) is not None:
            return None if wanted.strip() in _NO_PAGER else wanted
    return "less" if shutil.which("less") else None


def _run(command: str, text: str) -> bool:
    """Show a text by a pager; return whether the pager could be run."""
    modes = None
    with suppress(OSError, ValueError, termios.error):
        modes = termios.tcgetattr(sys.stdout.fileno())
    environ = {"LESS": _LESS, "LV": "-c", **os.environ}
    # The pager would inherit SIG_IGN, but not a handler.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with subprocess.Popen(
            command, shell=True, stdin=subprocess.PIPE, env=environ
        ) as process:
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            with _ended_with_us(process, modes):
                # communicate() ignores EPIPE: the pager may quit early.
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

    Otherwise the pager would go on, and read the keyboard along with the shell.

    :param modes: The modes before the pager began; ``None`` if unknown.
    """
    try:
        yield
    except BaseException:
        # The shell passes no signal on, but ends when its children have ended.
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
    """Yield the PIDs of the children of a process, and of their descendants."""
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


# --- Displays of samples: JSON lines, appended text, or a screen that is redrawn.


def is_in_front(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal with this process in its foreground."""
    if not is_terminal(stream):
        return False
    assert stream is not None
    try:
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except OSError:
        # The terminal of another session.
        return False


_MOST_KEYS = 256
"""Maximum bytes of keys to read at once."""

_MAX_WAIT_S = 1.0
"""Maximum time of one wait: a signal just before the wait does not interrupt it."""


class Keys:
    """Keys pressed on the terminal, if this process may read them."""

    def __init__(self) -> None:
        self._saved: list[Any] | None = None
        self._pressed: deque[str] = deque()

    def take(self) -> None:
        """Switch the terminal to receive each key as it is pressed."""
        # If the output is a pipe, its reader, such as less, may read the keys itself.
        if is_terminal(sys.stdout) and is_in_front(sys.stdin):
            self._fd = sys.stdin.fileno()
            with contextlib.suppress(termios.error):
                saved = termios.tcgetattr(self._fd)
                tty.setcbreak(self._fd, termios.TCSADRAIN)
                self._saved = saved

    def give_back(self) -> None:
        """Restore the terminal."""
        if self._saved is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._saved)
            self._saved = None

    @property
    def are_ours(self) -> bool:
        """Whether keys are received."""
        return self._saved is not None

    def quit_before(self, due_s: float) -> bool:
        """Wait until a time of the monotonic clock; return whether ``q`` was pressed.

        A key that was pressed before the call counts as well.
        """
        while (key := self.pressed_before(due_s)) is not None:
            if key in ("q", "Q", ""):
                return True
        return False

    def pressed_before(self, due_s: float) -> str | None:
        """Wait for a key until a time of the monotonic clock.

        :return: The characters of the key; empty at the end of input; ``None`` if no
            key was pressed.
        """
        while not self._pressed:
            left_s = due_s - time.monotonic()
            if self._saved is None:
                if left_s <= 0:
                    return None
                time.sleep(min(left_s, _MAX_WAIT_S))
            elif select.select([self._fd], [], [], max(min(left_s, _MAX_WAIT_S), 0))[0]:
                data = os.read(self._fd, _MOST_KEYS)
                if not data:
                    return ""
                from msatools.cli.live_view import split_keys

                self._pressed.extend(split_keys(data.decode("utf-8", "replace")))
            elif left_s <= 0:
                return None
        return self._pressed.popleft()


_SIZE_CHECK_S = 0.2
"""Time between checks of the terminal's size. SIGWINCH is not used, as it may interrupt
anything."""

_KEYS, _FEW_KEYS = "  q quits  ? keys", "  q quits, ?"


def can_redraw() -> bool:
    """Return whether standard output is a terminal that can be redrawn."""
    return os.environ.get("TERM", "dumb") != "dumb" and is_in_front(sys.stdout)


class Display(ABC, Generic[R]):
    """Shows samples, and waits until the next is due or the user quits."""

    def __init__(self) -> None:
        self._keys = Keys()

    def __enter__(self) -> "Display[R]":
        self._keys.take()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._keys.give_back()

    @abstractmethod
    def show(self, report: R) -> None:
        """Show a sample."""

    def quit_before(self, due_s: float) -> bool:
        """Wait until a time of the monotonic clock; return whether the user quit."""
        return self._keys.quit_before(due_s)


class JsonLines(Display[R]):
    """One line of JSON for each sample."""

    def show(self, report: R) -> None:
        with output() as out:
            forms.show(report, out)


class Appended(Display[R]):
    """Text, appended to earlier output."""

    def __init__(
        self,
        blocks: Callable[[R], Iterable[Block]],
        footer: Callable[[Cost], str],
        look: Callable[[TextIO], Device],
    ) -> None:
        super().__init__()
        self._blocks = blocks
        self._footer = footer
        self._look = look

    def show(self, report: R) -> None:
        self.show_of(report, time.time())

    def show_of(self, report: R, taken_s: float) -> None:
        """Show a sample taken at a time in seconds since 1970."""
        clock = time.strftime("%H:%M:%S", time.localtime(taken_s))
        blocks: list[Block] = [line(clock), *self._blocks(report)]
        if report.cost is not None:
            blocks.append(line(Span(self._footer(report.cost), "dim")))
        with output() as out:
            show(blocks, out, self._look(out))


class Screen(Display[R]):
    """Text on the whole terminal, each sample in place of the previous one.

    In the end the earlier contents of the terminal are restored, followed by the last
    sample.

    :param first: Text to show until there is a sample.
    :param view: The state that keys change: order, filter, columns, scrolling.
    """

    def __init__(
        self,
        blocks: Callable[[R], Iterable[Block]],
        footer: Callable[[Cost], str],
        look: Callable[[TextIO], Device],
        first: str,
        view: "LiveView",
    ) -> None:
        super().__init__()
        self._blocks = blocks
        self._footer = footer
        self._look = look
        self._view = view
        self._report: R | None = None
        self._newest: R | None = None
        """The newest sample not shown yet, because the screen is paused."""

        self._shown: list[Block] = []
        self._words = first
        self._size = os.terminal_size((0, 0))
        self._live: Live | None = None
        self._is_writing = False
        self._has_to_stop = False

    def __enter__(self) -> "Screen[R]":
        self._enter()
        self._stopper = signal.signal(signal.SIGTSTP, self._suspend)
        self._draw()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        signal.signal(signal.SIGTSTP, self._stopper)
        self._leave()
        is_gone = kind is not None and issubclass(kind, (OutputClosed, OutputError))
        self._view.leave()
        if self._shown and not is_gone:
            # Leave one line for the prompt.
            size = terminal_size(sys.stdout)
            drawing = self._drawing(size.columns)
            lines = map(drawing.styled, self._lines(drawing, size.lines - 1))
            with output() as out:
                out.write("\n".join([*lines, ""]))

    def show(self, report: R) -> None:
        self._newest = report
        if not self._view.is_paused:
            self._take_newest()
            self._draw()

    def _take_newest(self) -> None:
        """Show the newest sample from now on."""
        report, self._newest = self._newest, None
        if report is None:
            return
        self._report = report
        self._render(report)
        cost = "" if report.cost is None else "; " + self._footer(report.cost)
        self._words = time.strftime("%H:%M:%S") + cost

    def _render(self, report: R) -> None:
        self._view.sampled()
        self._shown = list(self._blocks(report))

    def quit_before(self, due_s: float) -> bool:
        while True:
            key = self._keys.pressed_before(
                min(due_s, time.monotonic() + _SIZE_CHECK_S)
            )
            if key is not None:
                if self._view.press(key):
                    return True
                if not self._view.is_paused:
                    self._take_newest()
                if self._report is not None and key in ("\r", "\n", "\x1b"):
                    # These keys end a prompt, which may have changed the columns.
                    self._render(self._report)
                self._draw()
            elif terminal_size(sys.stdout) != self._size:
                self._draw()
            if time.monotonic() >= due_s:
                return False

    def _draw(self) -> None:
        self._size = terminal_size(sys.stdout)
        if self._live is None:
            return
        drawing = self._drawing(self._size.columns)
        self._live.console.size = self._size
        frame = drawing.frame(self._lines(drawing, self._size.lines))
        with self._writing():
            self._live.update(frame, refresh=True)

    def _drawing(self, width: int) -> "Drawing":
        from msatools.render.terminal import Drawing

        # No tables by rich, which take 30 ms: the screen is drawn at each key.
        return Drawing(replace(self._look(sys.stdout), width=width), most_drawn=0)

    def _lines(self, drawing: "Drawing", height: int) -> "list[Row]":
        """Return all lines of the screen."""
        width = drawing.width
        lines, left_out = self._fitted(drawing, max(height - 1, 1))
        words = self._words
        if self._live is not None and (status := self._view.status):
            words = f"{status}; {words}"
        if left_out:
            words += f"; {left_out:,} more line{'s' if left_out > 1 else ''}"
        if self._live is not None:
            # The last line shows the cost, and how to quit.
            lines += [()] * (height - 1 - len(lines))
            end = self._ending(width - len(words))
            words = words[: max(width - len(end), 0)] + end
        last = drawing.lines(cut_line(Span(words, "dim")))
        return [*lines, *last]

    def _ending(self, room: int) -> str:
        """Return the hint on how to quit, in fewer words if there is little room."""
        if not self._keys.are_ours:
            return "  Ctrl-C ends it"
        return _KEYS if len(_KEYS) <= room else _FEW_KEYS

    def _fitted(self, drawing: "Drawing", height: int) -> "tuple[list[Row], int]":
        """Return the lines of the report or help, and the number of lines left out."""
        from msatools.render.terminal import fit

        view = self._view
        view.page = max(height - 4, 1)
        if view.shows_help:
            blocks, has_rows = [*view.help_blocks()], False
        else:
            blocks, has_rows = view.shown(self._shown)
        if has_rows or not (view.offset or view.shows_help):
            return fit(blocks, drawing, height)
        laid = [line for block in blocks for line in drawing.lines(block)]
        view.most = max(len(laid) - height, 0)
        view.offset = min(view.offset, view.most)
        fitting = laid[view.offset : view.offset + height]
        return fitting, len(laid) - view.offset - len(fitting)

    def _enter(self) -> None:
        from rich.live import Live

        from msatools.render.terminal import console_of

        self._keys.take()
        columns, lines = terminal_size(sys.stdout)
        device = replace(self._look(sys.stdout), width=columns, height=lines)
        # No auto_refresh: rich would draw from a thread of its own.
        self._live = Live(
            console=console_of(device, cast(TextIO, _Output())),
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with self._writing():
            self._live.start()

    def _leave(self) -> None:
        live, self._live = self._live, None
        # Restore the keys even if the terminal cannot be written to.
        with contextlib.suppress(Exception):
            if live is not None:
                live.stop()
        self._keys.give_back()

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Stop on SIGTSTP, but not while output is being written."""
        if self._is_writing:
            self._has_to_stop = True
        else:
            self._stop()

    def _stop(self) -> None:
        """Release the terminal while this process is stopped."""
        self._leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._enter()
        self._draw()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Delay a stop by SIGTSTP until the output is written."""
        self._is_writing = True
        try:
            yield
        finally:
            self._is_writing = False
        if self._has_to_stop:
            self._has_to_stop = False
            self._stop()


class _Output(io.TextIOBase):
    """A stream for rich on the current standard output, with readable errors."""

    def write(self, data: str) -> int:
        with output() as out:
            return out.write(data)


def footer(name: str, cost: Cost, share: float | None) -> str:
    """Return the cost of a sample, in a line.

    :param share: Maximum share of one CPU; ``None`` for no limit.
    """
    percent = 100 * cost.cpu_ns / cost.wall_ns if cost.wall_ns else 0
    most = "" if share is None else f" of {100 * share:g} % that it may"
    peak = "-" if cost.peak_bytes is None else size(cost.peak_bytes)
    return (
        f"msa-{name}: {cost.cpu_ns / 1e9:.2f} s CPU, {percent:.1f} % of one CPU{most}, "
        f"{peak}"
    )
