# SPDX-License-Identifier: LGPL-2.1-or-later

"""Programs that some tests need on the host."""

import shutil
from functools import cache

from fixtures.lab import host


@cache
def need(program: str, package: str | None = None) -> str:
    """Return the path of a program, which is installed if it is missing.

    :param package: The Debian package; by default that of the same name.
    :raises UnavailableError: if it cannot be installed, as without being root
    """
    path = shutil.which(program)
    if path is None:
        host.install([program], {package or program})
        path = shutil.which(program)
    assert path is not None
    return path
