# SPDX-License-Identifier: LGPL-2.1-or-later

"""Programs that some tests need on the host."""

import shutil
from functools import cache

import pytest

from fixtures.lab import host
from fixtures.lab.errors import LabError


@cache
def need(program: str, package: str | None = None) -> str:
    """Return the path of a program, which is installed if it is missing.

    The test is skipped if that is not possible, as without being root.

    :param package: The Debian package; by default that of the same name.
    """
    path = shutil.which(program)
    if path is None:
        try:
            host.install([program], {package or program})
        except LabError as error:
            pytest.skip(str(error))
        path = shutil.which(program)
    assert path is not None
    return path
