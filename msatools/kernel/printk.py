# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel's log, with a count of what cannot be read."""

from msatools.errors import UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.words import PAGE
from msatools.target.printk import LogRecord, log_records

_LOST = "messages of the kernel's log cannot be read"


def read_log(reader: Reader, losses: LossLog) -> list[LogRecord]:
    """Return the messages in the kernel's log, the oldest first.

    Messages that cannot be read are counted, and left out.

    :raises MissingError: if the kernel has no such log, as before v5.10
    """

    def read(address: int, size: int) -> tuple[bytes | bytearray, list[range]]:
        data, gaps = reader.read_around_gaps(address, size, PAGE)
        return data, [range(gap.offset, gap.offset + gap.size) for gap in gaps]

    def lose(count: int) -> None:
        losses.lose(Loss.LOG, _LOST, count=count)

    try:
        return list(log_records(reader.prog, read, lose))
    except UNREADABLE as error:
        losses.lose(Loss.LOG, f"the kernel's log cannot be read: {error}")
        return []
