# SPDX-License-Identifier: LGPL-2.1-or-later

"""The waker of a herd and the cost of its wake-ups, for the reports of all commands."""

from collections.abc import Iterator

from msatools.locks.base.model import Herd, UserFrame
from msatools.render.cells import NOT_KEPT
from msatools.reports.units import count


def woken_words(herd: Herd, interval_ns: int | None) -> Iterator[str]:
    """
    Say who wakes a herd, how often, and how much of that was in vain.

    :param interval_ns: That of the report; ``None`` if it is of one moment.
    """
    waker = herd.waker
    by = f" by {waker.pid} {waker.comm}" if waker else ""
    if herd.woken:
        yield f"{herd.woken:,} being woken{by}"
    elif waker and herd.confidence != "none":
        # By how many each thread has woken of late.
        yield f"woken{by}, most likely"
    if waker and waker.frames:
        yield f"it stands in {' < '.join(map(_frame_words, waker.frames))}"
    if herd.wakeups and herd.in_vain is not None and interval_ns:
        rate = count(round(herd.wakeups * 1e9 / interval_ns))
        yield f"{rate} wake-ups a second, {100 * herd.in_vain:.0f} % in vain"


def _frame_words(frame: UserFrame) -> str:
    """Write a frame: ``worker+0x1c (herd)``, or ``herd+0x11c0``; a guess with ``?``."""
    mark = "?" if frame.guess else ""
    module = frame.module or NOT_KEPT
    if frame.function is None:
        return f"{module}+{frame.offset:#x}{mark}"
    return f"{frame.function}+{frame.offset:#x}{mark} ({module})"
