# SPDX-License-Identifier: LGPL-2.1-or-later

"""The headers of a flattened kdump without its end, as a file of their own.

libkdumpfile opens no flattened kdump that lacks its end. makedumpfile writes headers
and bitmaps first, so that these are there.
"""

import os
from contextlib import suppress

from msatools.errors import DamagedDataError
from msatools.target import kdump
from msatools.target.flattened import END, SIGNATURE, FlatFile
from msatools.target.reading import opened

_AT_ONCE = 1 << 20

_copied: dict[str, int] = {}
"""Maps the path of a dump to the open file that has its headers."""


def copy(path: str) -> None:
    """Copy the headers of a dump, if it is a flattened kdump without its end.

    That has to be done before a sandbox forbids to write. What is wrong with the file
    is told by who opens it.
    """
    # Opening a FIFO without a writer would block.
    if not os.path.isfile(path):
        return
    with suppress(OSError, EOFError, DamagedDataError), opened(path) as read:
        ends_well = read(os.path.getsize(path) - len(END), len(END)) == END
        if read(0, len(SIGNATURE)) == SIGNATURE and not ends_well:
            flat = FlatFile(read)
            if not flat.is_complete:
                _copied[path] = _copied_of(flat)


def take(path: str) -> int:
    """Return an open file with the headers; the caller closes it.

    :raises DamagedDataError: if they contradict themselves
    :raises EOFError: if they are not all there
    :raises OSError: if the dump cannot be read, or nothing be written
    """
    headers = _copied.pop(path, None)
    if headers is not None:
        return headers
    with opened(path) as read:
        return _copied_of(FlatFile(read))


def _copied_of(flat: FlatFile) -> int:
    header = kdump.parse(flat.read_filled)
    if not flat.is_whole(header.bitmap_offset, header.table_offset):
        raise EOFError("the file ends before its pages can be found")
    headers = os.memfd_create("headers of a kdump", os.MFD_CLOEXEC)
    try:
        # What is not written is a hole; of the bitmaps the file has all.
        os.ftruncate(headers, flat.size)
        for span in (
            range(2 * header.block_size),
            *header.notes,
            range(header.bitmap_offset, header.table_offset),
        ):
            for start in range(span.start, min(span.stop, flat.size), _AT_ONCE):
                size = min(_AT_ONCE, span.stop - start)
                os.pwrite(headers, flat.read_filled(start, size), start)
        if not header.release and header.machine != kdump.NAMELESS:
            os.pwrite(headers, _utsname(header), kdump.UTSNAME_OFFSET)
    except BaseException:
        os.close(headers)
        raise
    return headers


def _utsname(header: kdump.Kdump) -> bytes:
    """Return what QEMU leaves blank, without which libkdumpfile searches all pages.

    Its own headers say nothing of these but the machine: here they only have to be
    there, as the kernel's release comes from VMCOREINFO.
    """
    fields = ("Linux", "(none)", "(unknown)", "(unknown)", header.machine, "(none)")
    return b"".join(
        field.encode().ljust(kdump.UTSNAME_FIELD, b"\0") for field in fields
    )
