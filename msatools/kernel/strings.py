# SPDX-License-Identifier: LGPL-2.1-or-later

"""C strings: the text up to the first zero byte, in data or in memory."""

import drgn

from msatools.kernel.reader import Reader

_PAGE = 4096


def decode_string(data: bytes) -> str:
    """Return the text of *data* up to its first zero byte; all of it if there is none.

    Bytes that are no UTF-8 are escaped.
    """
    return data.partition(b"\0")[0].decode("utf-8", "backslashreplace")


def read_string(reader: Reader, address: int, most: int) -> str:
    """Read a string of at most *most* bytes, a page at a time: the next may be missing.

    Bytes that are no UTF-8 are escaped.

    :raises drgn.FaultError: if it cannot be read, or does not end
    """
    data = b""
    while b"\0" not in data:
        if len(data) > most:
            raise drgn.FaultError("a string does not end", address)
        at = address + len(data)
        data += reader.read(at, min(most + 1, _PAGE - at % _PAGE))
    return decode_string(data)
