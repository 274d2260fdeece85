# SPDX-License-Identifier: LGPL-2.1-or-later

"""Report after report at intervals, with samples in between, until a key says stop."""

import contextlib
import itertools
import os
import random
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from drgn import FaultError

from msatools.command import Progress, R, Session
from msatools.kernel.report import Note
from msatools.output import is_terminal

T = TypeVar("T")


class Call(Protocol):
    """Calls what collects: shows how far it is, and puts its errors into words."""

    def __call__(self, collect: Callable[[Progress], T], /) -> T: ...


def reports(
    session: Session[R], interval_s: float, count: int | None, call: Call
) -> Generator[R, None, None]:
    """Give the report of each interval, *count* of them or until ``q`` is pressed."""
    with _Keys() as keys:
        call(session.begin)
        due = time.monotonic()
        for _ in range(count) if count else itertools.count():
            # A report that takes longer than the interval delays those after it.
            due = max(due + interval_s, time.monotonic())
            samples = _Samples(session, call)
            while (at := samples.next_s) is not None and at < due:
                if keys.quit_before(at):
                    return
                samples.take()
            if keys.quit_before(due):
                return
            yield samples.noted(call(session.advance))


class _Samples:
    """The samples within one interval: when the next is due, and what was lost."""

    def __init__(self, session: Session[Any], call: Call) -> None:
        self._session = session
        self._call = call
        self._period_starts_s = time.monotonic()
        self._lost = 0
        self._why = ""
        self.next_s = self._place()

    def take(self) -> None:
        """Take a sample; one that takes longer than the period delays the next."""
        self._call(self._sample)
        elapsed = self._period_starts_s + (self._session.period_s or 0)
        self._period_starts_s = max(elapsed, time.monotonic())
        self.next_s = self._place()

    def noted(self, report: R) -> R:
        """Note in the interval's report that samples were lost, if some were."""
        if not self._lost:
            return report
        text = f"{self._lost} samples within the interval are lost: {self._why}"
        return replace(report, notes=(*report.notes, Note("samples-lost", text)))

    def _sample(self, progress: Progress) -> None:
        try:
            self._session.sample()
        except FaultError as error:
            self._lost += 1
            self._why = str(error)

    def _place(self) -> float | None:
        """Choose a moment in the period, of the monotonic clock.

        A random one: what a task does at the same rate would be met always or never.
        """
        period_s = self._session.period_s
        if period_s is None:
            return None
        return self._period_starts_s + random.random() * period_s


class _Keys:
    """The keys pressed on the terminal, if there is one and it is ours."""

    def __init__(self) -> None:
        self._saved: list[Any] | None = None

    def __enter__(self) -> "_Keys":
        # A pipe's reader, such as less, may want the keys for itself.
        if is_terminal(sys.stdin) and is_terminal(sys.stdout):
            self._fd = sys.stdin.fileno()
            # It may be the terminal of another session, or we in its background.
            with contextlib.suppress(OSError, termios.error):
                if os.tcgetpgrp(self._fd) == os.getpgrp():
                    saved = termios.tcgetattr(self._fd)
                    tty.setcbreak(self._fd, termios.TCSADRAIN)
                    self._saved = saved
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._saved is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._saved)

    def quit_before(self, due: float) -> bool:
        """Wait until ``due``, of the monotonic clock; tell whether ``q`` came first.

        A key that was pressed while a report or a sample was made counts as well.
        """
        while True:
            left = due - time.monotonic()
            if self._saved is None:
                if left <= 0:
                    return False
                time.sleep(left)
            elif select.select([self._fd], [], [], max(left, 0))[0]:
                if os.read(self._fd, 1) in (b"q", b"Q", b""):
                    return True
            elif left <= 0:
                return False
