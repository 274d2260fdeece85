# SPDX-License-Identifier: LGPL-2.1-or-later

"""Errors that a collector expects: a kernel lacks something, or its data are damaged.

A collector catches these and no others, and counts what it goes without. They are no
subclasses of Python's own errors: an IndexError or a ValueError is a fault of msatools,
reported by :mod:`msatools.faults`.
"""

from drgn import FaultError


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


class DamagedDataError(Exception):
    """Memory that can be read holds what no kernel writes there.

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
"""Memory that is not there, or makes no sense."""

LOST = (*UNREADABLE, MissingError)
"""All that a part of a report may lack: the report goes on without that part."""
