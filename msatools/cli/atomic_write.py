# SPDX-License-Identifier: LGPL-2.1-or-later

"""Files that commands write because they were asked to."""

import contextlib
import os
import secrets
from pathlib import Path

from msatools.cli.output import OutputError


def check_writable(path: str) -> None:
    """See that a file can be written, before what is to be in it takes long.

    :raises OutputError: if it cannot be
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        # Least of all /dev/null, by root.
        what = "a directory" if target.is_dir() else "no regular file"
        raise OutputError(f"{path}: {what}; name a file")
    folder = target.resolve().parent
    if not folder.is_dir():
        raise OutputError(f"{path}: no such directory; make it, or name another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{path}: its directory is not writable; name another")


def replace_file(path: str, data: bytes) -> None:
    """Write a file at once: who reads it meanwhile has the whole of the old one.

    :raises OutputError: if it cannot be written
    """
    check_writable(path)
    # A link stays one.
    target = Path(path).resolve()
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with part.open("xb") as file:
            file.write(data)
        part.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        why = error.strerror or str(error)
        raise OutputError(f"{path}: {why}; write it elsewhere") from error
