# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel's log (kernel/printk/printk_ringbuffer.c), read in bulk.

drgn's helper reads a record with several reads, and follows the ring for as long as a
damaged dump says. The caller passes the function that reads memory: what made a dump is
described before a reader of the kernel exists.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import DamagedDataError
from msatools.selfdesc.find import find_type, find_variable, member_of, offset_of

Read = Callable[[int, int], tuple[bytes | bytearray, list[range]]]
"""``read(address, size)`` returns bytes, zero in gaps, and the gaps: ranges of offsets,
ascending."""

_MAX_BITS = 26
"""CONFIG_LOG_BUF_SHIFT is 25 at most. log_buf_len= may ask for 2 GiB (LOG_BUF_LEN_MAX),
but a damaged ring is to cost no such memory."""

_MAX_RECORD_BITS = _MAX_BITS - 5
"""There is a record for 32 bytes of text (PRB_AVGBITS)."""

_WORD = 8
_KEPT = (1, 2)
"""Members of enum desc_state, in the upper two bits of ``state_var``: committed and
finalized."""

_STATE_SHIFT = 62
_ID = (1 << _STATE_SHIFT) - 1
_IS_CPU = 1 << 31
"""Flag of ``caller_id``: it is a CPU, else the ID of a thread."""

_INFO = {
    "ts_nsec": ("time", "<u8"),
    "text_len": ("length", "<u2"),
    "facility": ("facility", "u1"),
    "caller_id": ("caller", "<u4"),
}


class LogRecord(Struct, frozen=True):
    """One message of the kernel's log."""

    time_ns: int
    """By the local clock of the CPU (local_clock())."""

    level: int
    """0 (emergency) to 7 (debug)."""

    text: str
    """Bytes that are not UTF-8 are escaped; it may have several lines."""

    tid: int | None
    """The thread that wrote it; ``None`` outside of threads."""

    cpu: int | None
    """The CPU that wrote it, if it was not in a thread."""

    facility: int = 0
    """As in syslog(3): 0 is the kernel."""

    @property
    def is_kernel(self) -> bool:
        """Whether the kernel itself wrote it.

        What a program writes to /dev/kmsg never is of facility 0
        (kernel/printk/printk.c, devkmsg_write()).
        """
        return self.facility == 0


def log_records(
    prog: drgn.Program, read: Read, lose: Callable[[int], None]
) -> Iterator[LogRecord]:
    """Yield the messages in the kernel's log, the oldest first.

    :param lose: Called with numbers of messages that cannot be read.
    :raises MissingError: if the kernel has no such log, as before v5.10
    :raises drgn.FaultError: if nothing of it can be read
    """
    ring = find_variable(prog, "prb").read_()
    descs, texts = ring.desc_ring, ring.text_data_ring
    count = 1 << _bits(descs.count_bits, ring, _MAX_RECORD_BITS)
    size = 1 << _bits(texts.size_bits, ring, _MAX_BITS)
    first = descs.tail_id.counter.value_() & _ID
    last = descs.head_id.counter.value_() & _ID
    used = min((last - first & _ID) + 1, count)
    rows = _Ring(read, count, last - used + 1, used, lose)
    state, begin, next_ = _descriptors(rows, descs)
    infos, level_bit = _infos(rows, descs)
    ids = np.arange(last - used + 1, last + 1).astype(np.uint64) & np.uint64(_ID)
    kept = (state & np.uint64(_ID) == ids) & np.isin(state >> _STATE_SHIFT, _KEPT)
    kept &= begin % np.uint64(_WORD) == 0  # else it has no text (BLK0_LPOS)
    if not kept.any():
        return
    start_of_all = int(begin[kept][0])
    length = min(max(int(next_[kept][-1]) - start_of_all, 0), size)
    texts_read = _Ring(read, size, start_of_all, length, lose)
    data, gaps = texts_read.read(texts.data.value_(), 1)
    lost, room = 0, size
    for row in np.flatnonzero(kept).tolist():
        info, start, end = infos[row], int(begin[row]), int(next_[row])
        if start % size > end % size:
            start = end - end % size  # a block is not split: it is at the start
        start += _WORD - start_of_all
        end -= start_of_all
        end = min(start + int(info["length"]), end)
        # Texts that overlap would be more than the ring holds. They need not be in the
        # order of their messages: another CPU may come between (prb_reserve()).
        is_there = 0 <= start <= end <= len(data) and end - start <= room
        if not is_there or _overlaps(gaps, start, end):
            lost += 1
            continue
        room -= end - start
        caller = int(info["caller"])
        yield LogRecord(
            time_ns=int(info["time"]),
            level=int(info["flags"]) >> level_bit & 7,
            text=bytes(data[start:end]).decode("utf-8", "backslashreplace"),
            tid=None if caller & _IS_CPU else caller,
            cpu=caller & ~_IS_CPU if caller & _IS_CPU else None,
            facility=int(info["facility"]),
        )
    lose(lost)


def _overlaps(gaps: list[range], start: int, end: int) -> bool:
    index = bisect_right(gaps, start, key=lambda gap: gap.stop)
    return index < len(gaps) and gaps[index].start < end


class _Ring(Struct, frozen=True):
    """The part in use of an array whose end is followed by its start."""

    read_memory: Read
    count: int
    """Number of elements of the array."""

    first: int
    """Number of the first element in use, modulo :attr:`count`."""

    used: int
    lose: Callable[[int], None]

    def read(self, address: int, size: int) -> tuple[bytes, list[range]]:
        """
        Read the elements in use.

        :param size: Bytes of an element.
        :return: The bytes, zero in the gaps, and the gaps.
        """
        start = self.first % self.count
        whole = min(self.used, self.count - start)
        data, gaps = b"", list[range]()
        for row, rows in ((start, whole), (0, self.used - whole)):
            part, missing = self.read_memory(address + row * size, rows * size)
            at = len(data)
            gaps += (range(at + gap.start, at + gap.stop) for gap in missing)
            data += part
        return data, gaps

    def records(self, address: int, record: np.dtype[Any]) -> npt.NDArray[Any]:
        """Read the elements in use; those that cannot be read are zero."""
        data, gaps = self.read(address, record.itemsize)
        self.lose(sum(-(-len(gap) // record.itemsize) for gap in gaps))
        return np.frombuffer(data, record)


def _bits(member: drgn.Object, ring: drgn.Object, most: int) -> int:
    bits = int(member.value_())
    if not 0 < bits <= most:
        raise DamagedDataError("no size of a log", ring.address_ or 0)
    return bits


def _descriptors(ring: _Ring, descs: drgn.Object) -> tuple[npt.NDArray[np.uint64], ...]:
    """Read each descriptor's state, and where its text begins and ends."""
    type_ = find_type(descs.prog_, "struct prb_desc")
    members = {
        "state": "state_var.counter",
        "begin": "text_blk_lpos.begin",
        "next": "text_blk_lpos.next",
    }
    fields = {name: (_offset(type_, at), "<u8") for name, at in members.items()}
    rows = ring.records(descs.descs.value_(), _dtype(fields, type_))
    return rows["state"], rows["begin"], rows["next"]


def _infos(ring: _Ring, descs: drgn.Object) -> tuple[npt.NDArray[Any], int]:
    """Read what is known of each message, and the bit of ``flags`` of its level."""
    type_ = find_type(descs.prog_, "struct printk_info")
    fields = {
        name: (_offset(type_, member), format_)
        for member, (name, format_) in _INFO.items()
    }
    bit = int(member_of(type_, "level").bit_offset)
    fields["flags"] = (bit // 8, "u1")
    return ring.records(descs.infos.value_(), _dtype(fields, type_)), bit % 8


def _offset(type_: drgn.Type, member: str) -> int:
    return int(offset_of(type_, member))


def _dtype(fields: dict[str, tuple[int, str]], type_: drgn.Type) -> np.dtype[Any]:
    return np.dtype(
        {
            "names": list(fields),
            "formats": [format_ for _, format_ in fields.values()],
            "offsets": [at for at, _ in fields.values()],
            "itemsize": drgn.sizeof(type_),
        }
    )
