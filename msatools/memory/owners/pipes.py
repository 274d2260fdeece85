# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages that hold data in pipes (fs/pipe.c): in no counter, and often many."""

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.files import OpenFiles
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader, column
from msatools.kernel.report import LossLog

_MAX_RING = 1 << 20


def pipe_pages(reader: Reader, files: OpenFiles, findings: LossLog) -> Addresses:
    """
    Find the addresses of the struct pages of all open pipes' own buffers.

    Pages that were spliced into a pipe belong to a file and are not among them.
    """
    prog = reader.prog
    pipe = prog.type("struct pipe_inode_info")
    buffer = prog.type("struct pipe_buffer")
    page, ops = (buffer.member(name).offset // 8 for name in ("page", "ops"))
    anonymous = np.uint64(prog["anon_pipe_buf_ops"].address_)
    # Pipes without a name have operations of their own since v6.15.
    pipes = files.private_data(("pipeanon_fops", "pipefifo_fops"))
    records, readable = reader.read_records(pipes, drgn.sizeof(pipe))
    found = _spare_pages(pipe, records)
    rings = column(records, pipe.member("ring_size").offset, 4)
    bufs = column(records, pipe.member("bufs").offset)
    # The kernel finds a place in a ring by a mask.
    possible = (rings & (rings - np.uint64(1))) == 0
    possible &= readable & (bufs != 0) & (rings != 0) & (rings <= _MAX_RING)
    findings.lose(Loss.PIPES, count=int(np.count_nonzero(~possible)))
    for address, ring in zip(
        bufs[possible].tolist(), rings[possible].tolist(), strict=True
    ):
        try:
            words = reader.words(address, ring * (drgn.sizeof(buffer) // 8))
        except drgn.FaultError:
            findings.lose(Loss.PIPES)
            continue
        words = words.reshape(ring, drgn.sizeof(buffer) // 8)
        # A buffer that has been read keeps its page pointer but not its ops.
        found.append(words[words[:, ops] == anonymous, page])
    pages = np.concatenate(found)
    used: Addresses = pages[pages != 0]
    return used


def _spare_pages(pipe: drgn.Type, records: npt.NDArray[np.uint8]) -> list[Addresses]:
    """Find the pages that pipes keep for the next write."""
    if not pipe.has_member("prealloc"):
        # An array of two since v6.15, one before.
        spare = pipe.member("tmp_page")
        places = range(spare.offset, spare.offset + drgn.sizeof(spare.type), 8)
        return [column(records, place) for place in places]
    # A stack of them since v7.3; what is above its count was taken off.
    stack = pipe.member("prealloc")
    pages, count = (stack.type.member(name) for name in ("pages", "count"))
    counts = column(records, stack.offset + count.offset, drgn.sizeof(count.type))
    return [
        column(records, stack.offset + pages.offset + 8 * number)[counts > number]
        for number in range(drgn.sizeof(pages.type) // 8)
    ]
