# SPDX-License-Identifier: LGPL-2.1-or-later

"""Errors for targets that cannot be opened or read, with a text for the user."""

from collections.abc import Iterator
from contextlib import contextmanager

from drgn import FaultError

from msatools.errors import DamagedDataError, MissingError


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
def losses_refused(
    what: str, *, live: bool = False, truncated: bool = False
) -> Iterator[None]:
    """Convert what a kernel lacks or what is damaged, where a report cannot do without.

    :param what: What was requested, usually a path.
    :param live: Whether the kernel runs.
    :param truncated: Whether the dump is.
    :raises TargetError: for these; any other error is a fault of msatools, and left
    """
    try:
        yield
    except MissingError as error:
        raise TargetError(
            what,
            f"its kernel or its types lack something ({error})",
            "name the full vmlinux with -s, if you did not",
        ) from error
    except FaultError as error:
        if truncated:
            raise DamagedDumpError(
                what, "cut off, and too little is left", "copy the dump again"
            ) from error
        raise TargetError(
            what,
            f"it lacks memory that the report needs ({error})",
            "try again" if live else "take a dump that leaves less out",
        ) from error
    except DamagedDataError as error:
        if live:
            raise TargetError(
                what, f"its data make no sense ({error})", "try again"
            ) from error
        raise DamagedDumpError(
            what,
            f"its data are damaged ({error})",
            "copy the dump again; another command may need less of it",
        ) from error
    except MemoryError as error:
        raise TargetError(
            what,
            "there is not enough memory to read it",
            "give it more, or copy the dump again if it may be damaged",
        ) from error
    except OSError as error:
        why = error.strerror or str(error)
        if live:
            raise TargetError(
                what, f"the kernel is gone: {why}", "start it again"
            ) from error
        raise TargetError(
            what, f"it cannot be read: {why}", "check the disk, and copy the dump again"
        ) from error
