# SPDX-License-Identifier: LGPL-2.1-or-later

"""Text about the waker of a herd and its wake-ups, for all commands."""

from collections.abc import Iterator

from msatools.locks.base.model import Herd, UserFrame
from msatools.render.cells import NOT_KEPT
from msatools.reports.units import count


def woken_words(herd: Herd, interval_ns: int | None) -> Iterator[str]:
    """
    Yield the waker of a herd, the rate of wake-ups, and the share of futile ones.

    :param interval_ns: Interval of the report; ``None`` in a one-shot report.
    """
    waker = herd.waker
    by = f" by {waker.pid} {waker.comm}" if waker else ""
    if herd.woken:
        yield f"{herd.woken:,} being woken{by}"
    elif waker and herd.confidence != "none":
        # The waker is inferred from each thread's recent wakees.
        yield f"woken{by}, most likely"
    if waker and waker.frames:
        yield f"it stands in {' < '.join(map(_frame_words, waker.frames))}"
    if herd.wakeups and herd.in_vain is not None and interval_ns:
        rate = count(round(herd.wakeups * 1e9 / interval_ns))
        yield f"{rate} wake-ups a second, {100 * herd.in_vain:.0f} % needless"


def _frame_words(frame: UserFrame) -> str:
    """Return a frame: ``worker+0x1c (herd)``, ``herd+0x11c0``; a guess has a ``?``."""
    mark = "?" if frame.guess else ""
    module = frame.module or NOT_KEPT
    if frame.function is None:
        return f"{module}+{frame.offset:#x}{mark}"
    return f"{frame.function}+{frame.offset:#x}{mark} ({module})"
