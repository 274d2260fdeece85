# SPDX-License-Identifier: LGPL-2.1-or-later

"""What is told of a herd in the reports of all commands: who wakes it, at what cost."""

from collections.abc import Iterator

from msatools.locks.model import Herd
from msatools.render.units import count


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
        # By whom each thread has woken last.
        yield f"woken{by}, most likely"
    if herd.wakeups and herd.in_vain is not None and interval_ns:
        rate = count(round(herd.wakeups * 1e9 / interval_ns))
        yield f"{rate} wake-ups a second, {100 * herd.in_vain:.0f} % in vain"
