# SPDX-License-Identifier: LGPL-2.1-or-later

"""A drgn program whose memory is a byte string with holes."""

from collections.abc import Collection

from drgn import Architecture, FaultError, Platform, Program

from msatools.kernel.reader import Reader

BASE = 0x1000_0000


def reader_of(
    data: bytes, holes: Collection[int] = (), granule: int = 64, why: str = "hole"
) -> Reader:
    """Serve *data* at :data:`BASE`; blocks of *granule* bytes in *holes* fault."""
    prog = Program(Platform(Architecture.X86_64))

    def read(address: int, count: int, offset: int, physical: bool) -> bytes:
        for hole in holes:
            if offset < (hole + 1) * granule and offset + count > hole * granule:
                raise FaultError(why, BASE + hole * granule)
        return data[offset : offset + count]

    prog.add_memory_segment(BASE, len(data), read)
    return Reader(prog)
