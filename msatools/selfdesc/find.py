# SPDX-License-Identifier: LGPL-2.1-or-later

"""Lookups in the types and symbols of a kernel, and calls of drgn's helpers.

drgn's errors for a missing name become ``MissingError``. Failed lookups of variables,
and the names under which members are found, are recorded for ``--self-check``.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from traceback import walk_tb
from types import TracebackType
from typing import ParamSpec, TypeVar

import drgn
from msgspec import Struct, field

from msatools.errors import (
    LOST,
    DamagedDataError,
    MissingError,
    MissingMemberError,
    MissingSymbolError,
    MissingTypeError,
    NotSupportedError,
)

# --- Record of lookups in a kernel's types and symbols, for --self-check.
#
# A kernel that lacks a variable or a member is read another way, or not at all; on a
# kernel that nobody has tried, check this record first.


_KEY = "msatools.lookups"
"""Key of the program's :class:`Lookups` in ``prog.cache``."""


class Lookups(Struct):
    """Names that were looked up in one program."""

    variables_missing: set[str] = field(default_factory=set)
    members: dict[tuple[str, str], str | None] = field(default_factory=dict)
    """Maps a type and the newest name of a member to the name that the kernel has;
    ``None`` if it has no such member."""


def lookups(prog: drgn.Program) -> Lookups:
    """Return the record of a program's lookups so far."""
    found: Lookups = prog.cache.setdefault(_KEY, Lookups())
    return found


def note_member(
    type_: drgn.Type, candidates: tuple[str, ...], found: str | None
) -> None:
    """Record the name of a member that was found; ``None`` if none of *candidates* was.

    :param candidates: The names that kernels have used, the newest first.
    """
    if candidates:
        key = type_.type_name(), candidates[0]
        lookups(type_.prog).members[key] = found


# --- Lookups in the types and symbols of a kernel, and calls of drgn's helpers.
#
# drgn raises LookupError for what a kernel lacks, of which KeyError and IndexError are
# subclasses, and a dozen of Python's errors for numbers that only damaged data have. A
# clause that catches these hides faults of msatools. So drgn is called through these
# functions, which raise the errors of msatools.errors.


P = ParamSpec("P")
T = TypeVar("T")

_ABSURD = (
    *(drgn.BadDataError, OverflowError, ValueError, ZeroDivisionError),
    *(MemoryError, struct.error),
)
"""Errors that drgn's helpers raise for numbers that only damaged data have."""


class _Lookup:
    """Context that converts drgn's errors of lookups, and no others.

    drgn raises LookupError, of which Python and numpy raise only subclasses;
    AttributeError for a member that an object lacks; and NotImplementedError for what
    it does not support on an architecture, or with integers of more than 64 bits.
    """

    def __init__(self, missing: type[MissingError]) -> None:
        self._missing = missing

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is LookupError or kind is drgn.ObjectNotFoundError:
            raise self._missing(str(error)) from error
        if kind is NotImplementedError:
            raise NotSupportedError(str(error)) from error
        if kind is AttributeError and isinstance(error.obj, drgn.Object):  # type: ignore[union-attr]
            raise MissingMemberError(str(error)) from error


_TYPE = _Lookup(MissingTypeError)
_SYMBOL = _Lookup(MissingSymbolError)
_MEMBER = _Lookup(MissingMemberError)

drgn_lookups = _MEMBER
"""Context that converts drgn's errors for a missing member, or for an object of a type
that the kernel lacks, to :class:`MissingMemberError`."""


def find_type(prog: drgn.Program, name: str, filename: str | None = None) -> drgn.Type:
    """Return a type by name, such as ``struct page``.

    :raises MissingTypeError: if the kernel's types lack it
    """
    with _TYPE:
        return prog.type(name, filename)


def find_variable(prog: drgn.Program, name: str) -> drgn.Object:
    """Return a variable of the kernel, or a constant that drgn derives.

    DWARF may have a variable that the compiler optimised out, or a declaration without
    a definition. For these drgn returns an absent object, which raises only when used.

    :raises MissingSymbolError: if the kernel has no such variable, or it is absent
    """
    try:
        with _SYMBOL:
            found = prog[name]
        if found.absent_:
            raise MissingSymbolError(f"{name} has no place in this kernel")
    except MissingError:
        lookups(prog).variables_missing.add(name)
        raise
    return found


def find_constant(prog: drgn.Program, name: str) -> drgn.Object:
    """Return an enumerator or a macro.

    :raises MissingSymbolError: if the kernel's types lack it
    """
    with _SYMBOL:
        return prog.constant(name)


def find_symbol(prog: drgn.Program, name: str | int) -> drgn.Symbol:
    """Return the symbol of a name, or the one that contains an address.

    :raises MissingSymbolError: if the kernel has no such symbol
    """
    with _SYMBOL:
        return prog.symbol(name)


def member_of(type_: drgn.Type, name: str) -> drgn.TypeMember:
    """Return a member of a structure or a union.

    :raises MissingMemberError: if the type has no such member
    """
    with _MEMBER:
        return type_.member(name)


def offset_of(type_: drgn.Type, name: str) -> int:
    """Return the offset in bytes of a member, such as ``tasks.next``.

    :raises MissingMemberError: if there is no such member
    """
    with _MEMBER:
        offset: int = drgn.offsetof(type_, name)
        return offset


def object_at(prog: drgn.Program, type_name: str, address: int) -> drgn.Object:
    """Return the object of a type at an address.

    :raises MissingTypeError: if the kernel's types lack it
    """
    with _TYPE:
        return drgn.Object(prog, type_name, address=address)


def pointer_to(prog: drgn.Program, type_name: str, address: int) -> drgn.Object:
    """Return a pointer to an object of a type.

    :raises MissingTypeError: if the kernel's types lack it
    """
    with _TYPE:
        return drgn.Object(prog, f"{type_name} *", value=address)


def ask(helper: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a helper or a method of drgn, and return its result.

    :raises drgn.FaultError: as the helper does
    :raises MissingError: if the kernel lacks a name that the helper looks up
    :raises NotSupportedError: if drgn does not support this kernel there
    :raises DamagedDataError: if it fails in a way that only damaged data or types cause
    """
    try:
        with _SYMBOL:
            return helper(*args, **kwargs)
    except Exception as error:
        if not _is_of_damage(error):
            raise
        raise _damaged(error) from error


def ask_each(
    helper: Callable[P, Iterable[T]], *args: P.args, **kwargs: P.kwargs
) -> Iterator[T]:
    """Yield the items of a helper of drgn; raise as :func:`ask` does.

    An exception raised in the caller's loop is not converted.
    """
    try:
        with _SYMBOL:
            yield from helper(*args, **kwargs)
    except Exception as error:
        if not _is_of_damage(error):
            raise
        raise _damaged(error) from error


def _is_of_damage(error: Exception) -> bool:
    if isinstance(error, TypeError):
        # Raised in drgn's Python code: a member has an unexpected type. Else, as drgn's
        # functions in C have no frame, msatools has passed wrong arguments.
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        module: str = frames[-1].f_globals.get("__name__", "")
        return module.partition(".")[0] == "drgn"
    # Where drgn has no class for an error, it raises a plain Exception.
    return type(error) is Exception or isinstance(error, _ABSURD)


def _damaged(error: Exception) -> DamagedDataError:
    kind = "" if type(error) is Exception else f"{type(error).__name__}: "
    return DamagedDataError(f"{kind}{error}")


def alignment(some: drgn.Type) -> int:
    """Return the alignment of a type in bytes; 1 if unknown."""
    if some.kind in (drgn.TypeKind.TYPEDEF, drgn.TypeKind.ARRAY):
        return alignment(some.type)
    if some.kind in (drgn.TypeKind.STRUCT, drgn.TypeKind.UNION):
        # A structure may be packed, which BTF does not record.
        return 1
    return drgn.sizeof(some) if some.is_complete() else 1


# --- The VMCOREINFO note, in which a kernel describes itself to makedumpfile.


def vmcoreinfo(prog: drgn.Program) -> Mapping[str, str]:
    """Return the values of the VMCOREINFO note by key; empty if there is no note."""
    try:
        text = find_variable(prog, "VMCOREINFO").string_()
    except LOST:
        return {}
    return _parse(text)


@lru_cache(maxsize=4)
def _parse(text: bytes) -> Mapping[str, str]:
    lines = text.decode(errors="replace").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def vmcoreinfo_number(prog: drgn.Program, name: str) -> int | None:
    """Return the value of a ``NUMBER(name)`` line; ``None`` if not found.

    :raises DamagedDataError: if the value is no number
    """
    value = vmcoreinfo(prog).get(f"NUMBER({name})")
    return None if value is None else number(value)


def number(text: str) -> int:
    """Parse a value of VMCOREINFO, in the base of its prefix (0x), else decimal.

    :raises DamagedDataError: if it is no number
    """
    return _integer(text, 0)


def hex_number(text: str) -> int:
    """Parse a hexadecimal value of VMCOREINFO without prefix, such as an address.

    :raises DamagedDataError: if it is no number
    """
    return _integer(text, 16)


def _integer(text: str, base: int) -> int:
    try:
        return int(text, base)
    except ValueError as error:
        raise DamagedDataError(f"VMCOREINFO: {error}") from error
