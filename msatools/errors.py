# SPDX-License-Identifier: LGPL-2.1-or-later

"""Errors that a collector expects, and faults of msatools itself.

Collectors raise and catch :data:`LOST`: a kernel lacks something, or its data are
damaged or not there. Any other error is a fault of msatools: the command line names the
place of it, and asks the user to report it.
"""

import traceback
from types import FrameType

from drgn import FaultError
from msgspec import Struct

from msatools import __version__

# --- Errors that a collector expects: a kernel lacks something, or its data are
# damaged.
#
# A collector catches these and no others, and counts the missing data. They are no
# subclasses of Python's own errors: an IndexError or a ValueError is a fault of
# msatools, reported by fault_of, below.


class MissingError(Exception):
    """The kernel, its types or its symbols lack something that other kernels have."""


class MissingTypeError(MissingError):
    """No such type."""


class MissingMemberError(MissingError):
    """No such member of a type."""


class MissingSymbolError(MissingError):
    """No such variable, function or constant, or none at that address."""


class NotSupportedError(MissingError):
    """drgn does not do this for the kernel's architecture, or for its types."""


class UncertainNameError(MissingError, LookupError):
    """The kernel has the name, but its type or its value is not certain.

    People at drgn's prompt, who ask for it with ``prog[name]``, expect a LookupError.
    """


class AmbiguousError(UncertainNameError):
    """A name has several meanings, or its value is not certain."""


class UntypedError(UncertainNameError):
    """A symbol exists, but its type is not certain."""


class NotSoError(MissingError):
    """The condition of a declaration does not hold for this kernel."""


class DamagedDataError(Exception):
    """Readable memory holds a value that no kernel writes there.

    :param what: What is wrong.
    :param address: Where it is; ``None`` if it is not at one address.
    """

    def __init__(self, what: str, address: int | None = None) -> None:
        super().__init__(what, address)
        self.what = what
        self.address = address

    def __str__(self) -> str:
        return self.what if self.address is None else f"{self.what}: {self.address:#x}"


UNREADABLE = (FaultError, DamagedDataError)
"""Errors of memory that is not there, or holds impossible values."""

LOST = (*UNREADABLE, MissingError)
"""All that a part of a report may lack: the report goes on without that part."""


# --- Faults of msatools itself: the place of each, and the report for its authors.
#
# An error that no collector expects (see LOST, above) is never explained by the kernel,
# the dump or the command line: it is reported as ours.


EXIT_FAULT = 70
"""Exit status of a run with a fault; <sysexits.h> EX_SOFTWARE."""

WHAT_TO_DO = "run it again with --debug, and send its authors what that prints"

_PACKAGE = __name__.partition(".")[0]
_CALLS = f"{_PACKAGE}.selfdesc.find"
"""The module through which all others call drgn: a fault is in its caller."""


class OwnFault(Struct, frozen=True):
    """An exception that no collector expects: a fault of msatools, not of the dump."""

    text: str
    """Where it is, and the error: ``msatools/prstat/rows.py:159: KeyError: 'pid'``."""

    traceback: str
    """Python's traceback, several lines."""

    def __str__(self) -> str:
        return f"a fault of {_PACKAGE} {__version__}, at {self.text}"


def fault_of(error: BaseException) -> OwnFault:
    """Convert an unexpected error to a fault with its place."""
    lines = traceback.format_exception_only(type(error), error)
    return OwnFault(
        f"{_place(error)}: {' '.join(''.join(lines).split())}",
        "".join(traceback.format_exception(error)),
    )


def fault_line(fault: OwnFault) -> str:
    """Return the line on standard error, after the command's name."""
    return f"{fault}; {WHAT_TO_DO}"


def _place(error: BaseException) -> str:
    """Return the innermost place in msatools that an error went through."""
    places = [
        (_path(frame), line, _is_ours(frame))
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") != _CALLS
    ]
    ours = [place for place in places if place[2]] or places
    path, line, _ = ours[-1] if ours else ("unknown", 0, False)
    return f"{path}:{line}"


def _is_ours(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] == _PACKAGE


def _path(frame: FrameType) -> str:
    """Return the path of a frame's file, as in an import if it is ours."""
    file = frame.f_code.co_filename
    if not _is_ours(frame):
        return file
    path = str(frame.f_globals["__name__"]).replace(".", "/")
    return f"{path}/__init__.py" if file.endswith("__init__.py") else f"{path}.py"
