# SPDX-License-Identifier: LGPL-2.1-or-later

"""C strings, in data or in memory."""

from msatools.errors import DamagedDataError
from msatools.kernel.reader import Reader
from msatools.kernel.words import PAGE


def decode_string(data: bytes) -> str:
    """Return the text of *data* up to its first zero byte, if it has one.

    Bytes that are not UTF-8 are escaped.
    """
    return data.partition(b"\0")[0].decode("utf-8", "backslashreplace")


def read_string(reader: Reader, address: int, most: int) -> str:
    """Read a string of at most *most* bytes.

    No page after its end is read, as it may be missing. Bytes that are not UTF-8 are
    escaped.

    :raises UNREADABLE: if it cannot be read, or is longer
    """
    data = b""
    while b"\0" not in data:
        if len(data) > most:
            raise DamagedDataError("a string does not end", address)
        position = address + len(data)
        data += reader.read(position, min(most + 1, PAGE - position % PAGE))
    return decode_string(data)
