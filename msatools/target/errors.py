# SPDX-License-Identifier: LGPL-2.1-or-later

"""Errors for targets that cannot be opened or read, with a text for the user."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager

from drgn import BadDataError

ABSURD = (
    *(BadDataError, OverflowError, ValueError, RecursionError, MemoryError),
    ZeroDivisionError,
    # drgn has no arithmetic of integers with more than 64 bits.
    *(NotImplementedError, struct.error),
)
"""What drgn, numpy and Python raise for numbers that only damaged data have."""


class TargetError(Exception):
    """A target, or its types, cannot be opened.

    :param what: What was requested, usually a path.
    :param why: What is wrong with it.
    :param what_to_do: The next step for the user.
    """

    def __init__(self, what: str, why: str, what_to_do: str) -> None:
        super().__init__(what, why, what_to_do)
        self.what = what
        self.why = why
        self.what_to_do = what_to_do

    def __str__(self) -> str:
        return f"{self.what}: {self.why}; {self.what_to_do}"


class NotADumpError(TargetError):
    """The file can be read, but it is not a dump of a kernel."""


class DamagedDumpError(TargetError):
    """The file is a dump, but too damaged to be opened."""


class UnsupportedMachineError(TargetError):
    """The dump is of a machine that is not supported."""

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(
            path,
            f"a dump of a {kind} kernel, and only 64-bit little-endian ones are read",
            "use crash, or drgn by itself",
        )


class NotPermittedError(TargetError):
    """The target exists, but this user or this kernel may not read it."""


class NoTypesError(TargetError):
    """No source has the types and symbols of this kernel."""


class WrongBuildError(TargetError):
    """The debug info belongs to another build of the kernel."""


def damaged_types(what: str, error: Exception) -> NoTypesError:
    """Return the error for damaged types in a kernel."""
    return NoTypesError(
        what,
        f"the types that the kernel carries are damaged: {error}",
        "name its vmlinux with -s",
    )


@contextmanager
def absurd_data_refused(what: str) -> Iterator[None]:
    """Convert errors of absurd data, where they are no loss of a part of the report.

    :param what: What was requested, usually a path.
    :raises DamagedDumpError: for these
    """
    try:
        yield
    except ABSURD as error:
        raise DamagedDumpError(
            what,
            f"its data are damaged ({type(error).__name__}: {error})",
            "if they are sound, run it with --debug and report this",
        ) from error
