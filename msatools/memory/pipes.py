# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages that hold data in pipes (fs/pipe.c): in no counter, and often many."""

import drgn
import numpy as np

from msatools.kernel.files import OpenFiles
from msatools.kernel.reader import Addresses, Reader, column
from msatools.kernel.report import Findings

_MAX_RING = 1 << 20


def pipe_pages(reader: Reader, files: OpenFiles, findings: Findings) -> Addresses:
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
    findings.coverage["pipes_unreadable"] += int(np.count_nonzero(~readable))
    # Pages kept for the next write: one, an array of two since v6.15.
    spare = pipe.member("tmp_page")
    found = [
        column(records, spare.offset + at)
        for at in range(0, drgn.sizeof(spare.type), 8)
    ]
    rings = column(records, pipe.member("ring_size").offset, 4)
    bufs = column(records, pipe.member("bufs").offset)
    for address, ring in zip(bufs.tolist(), rings.tolist(), strict=True):
        if not address or not 0 < ring <= _MAX_RING:
            continue
        try:
            words = reader.words(address, ring * (drgn.sizeof(buffer) // 8))
        except drgn.FaultError:
            findings.coverage["pipes_unreadable"] += 1
            continue
        words = words.reshape(ring, drgn.sizeof(buffer) // 8)
        # A buffer that has been read keeps its page pointer but not its ops.
        found.append(words[words[:, ops] == anonymous, page])
    pages = np.concatenate(found)
    used: Addresses = pages[pages != 0]
    return used
