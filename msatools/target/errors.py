# SPDX-License-Identifier: LGPL-2.1-or-later

"""Why a target could not be opened, in words for the person who named it."""


class TargetError(Exception):
    """A target, or its types, could not be had.

    :param what: what was asked for, usually a path
    :param why: what is wrong with it
    :param what_to_do: the next step for the user
    """

    def __init__(self, what: str, why: str, what_to_do: str) -> None:
        super().__init__(what, why, what_to_do)
        self.what = what
        self.why = why
        self.what_to_do = what_to_do

    def __str__(self) -> str:
        return f"{self.what}: {self.why}; {self.what_to_do}"


class NotADumpError(TargetError):
    """The file can be read, but it is no dump of a kernel."""


class DamagedDumpError(TargetError):
    """The file was a dump, but too little of it is left to open it."""


class NotPermittedError(TargetError):
    """The target is there, but this user or this kernel does not allow it."""


class NoTypesError(TargetError):
    """Nothing describes the types and symbols of this kernel."""


class WrongBuildError(TargetError):
    """The debug info named belongs to another build of the kernel."""


def damaged_types(what: str, error: Exception) -> NoTypesError:
    """Return the error for damaged types in a kernel."""
    return NoTypesError(
        what,
        f"the types that the kernel carries are damaged: {error}",
        "name its vmlinux with -s",
    )
