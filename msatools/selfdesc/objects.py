# SPDX-License-Identifier: LGPL-2.1-or-later

"""Find the kernel's variables, functions and constants where no debug info names them.

A look-up has three outcomes, which must not be taken for each other: the object; none,
because this kernel does not have it; and an error, because it is there but nothing
tells for sure what it is. That is never guessed.
"""

import re
from dataclasses import dataclass

from drgn import (
    FindObjectFlags,
    Object,
    Program,
    Symbol,
    SymbolIndex,
    SymbolKind,
    Type,
    TypeKind,
    sizeof,
)

from msatools.selfdesc.globals import VARIABLES
from msatools.selfdesc.types import KEYWORDS, AmbiguousError, BtfTypes


class NotSoError(LookupError):
    """What a declaration presumes is not so of this kernel."""


@dataclass(frozen=True)
class Declaration:
    """One line of the table."""

    name: str
    element: str
    """The type, in C, without the lengths of arrays."""

    lengths: tuple[str, ...] = ()
    """Of arrays, the outermost first: a number, an enumerator, or empty for none."""

    condition: str = ""
    """A type, ``type.member`` or enumerator that must be there; ``!`` for must not."""

    def resolve(self, types: BtfTypes) -> Type:
        """Make the type, out of those that this kernel has.

        :raises LookupError: if the kernel does not have what the line is made of
        """
        if self.condition and not _holds(types, self.condition):
            raise NotSoError(f"it is not so that {self.condition}")
        members = re.fullmatch(r"struct \{(.*)\}", self.element)
        if members:
            made = types.find_anonymous(members[1].split())
        else:
            made = types.parse(self.element)
        for length in reversed(self.lengths):
            made = types.prog.array_type(made, *_length(types, length))
        return made


def _holds(types: BtfTypes, condition: str) -> bool:
    """Return whether a condition is met.

    :raises AmbiguousError: if nothing tells: "not there" must not be taken from that
    """
    negated = condition.startswith("!")
    type_name, _, member = condition.lstrip("!").partition(".")
    if " " not in type_name:
        return (types.find_constant(type_name) is not None) != negated
    keyword, _, name = type_name.partition(" ")
    found = types.find({KEYWORDS[keyword]}, name)
    is_there = found is not None and (not member or found.has_member(member))
    return is_there != negated


def _length(types: BtfTypes, length: str) -> tuple[int, ...]:
    if not length:
        return ()
    if length.isdigit():
        return (int(length),)
    constant = types.find_constant(length)
    if constant is None:
        raise LookupError(f"BTF has no constant {length}")
    return (int(constant),)


def parse(text: str) -> dict[str, tuple[Declaration, ...]]:
    """Parse lines of ``type | name`` or ``type | name | condition``.

    :raises ValueError: if a line is none
    """
    table: dict[str, tuple[Declaration, ...]] = {}
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        fields = [field.strip() for field in line.split("|")]
        if not 2 <= len(fields) <= 3 or not all(fields):
            raise ValueError(f"not a declaration: {line}")
        element, name, *condition = fields
        lengths = tuple(re.findall(r"\[(\w*)\]", element))
        declaration = Declaration(
            name, element.partition("[")[0].strip(), lengths, *condition
        )
        table[name] = (*table.get(name, ()), declaration)
    return table


FUNCTIONS = frozenset({"vmemmap_populate"})
"""Functions of which only the presence is asked, and which older BTF (5.10) lacks."""

TABLE = parse(VARIABLES)


_UNKNOWN_ROOM = 0x10000
"""drgn gives symbols no size that are this far from the next (MAX_SYMBOL_LENGTH)."""


class UntypedError(LookupError):
    """A symbol is there, but nothing tells its type for sure."""


class Objects:
    """The variables, functions and constants of the kernel proper.

    Types come from BTF (constants, per-CPU variables, functions) or else from what is
    declared in :mod:`msatools.selfdesc.globals`; addresses from *symbols*.
    """

    def __init__(self, prog: Program, types: BtfTypes, symbols: SymbolIndex) -> None:
        self.prog = prog
        self.types = types
        self.symbols = symbols
        self._found: dict[str, Object | None] = {}

    def find(self, name: str, flags: FindObjectFlags) -> Object | None:
        """Find an object of the kinds wanted, ``None`` if the kernel has none.

        :raises LookupError: if it is there, and nothing tells for sure what it is
        """
        found = None
        if flags & (FindObjectFlags.FUNCTION | FindObjectFlags.VARIABLE):
            if name not in self._found:
                self._found[name] = self._at_symbol(name)
            found = self._found[name]
            wanted = FindObjectFlags.VARIABLE
            if found is not None and found.type_.kind == TypeKind.FUNCTION:
                wanted = FindObjectFlags.FUNCTION
            if not flags & wanted:
                found = None
        if found is None and flags & FindObjectFlags.CONSTANT:
            found = self.types.find_constant(name)
        return found

    def _at_symbol(self, name: str) -> Object | None:
        symbols = self.symbols(self.prog, name, None, False)
        if not symbols:
            return None
        if len({symbol.address for symbol in symbols}) > 1:
            raise AmbiguousError(f"the kernel has {len(symbols)} symbols {name}")
        symbol = symbols[0]
        # Variables are few in BTF; to look for a function, all are indexed.
        found = self.types.find_variable(name)
        if found is None and symbol.kind != SymbolKind.OBJECT:
            found = self._prototype(name)
        if found is None:
            found = self._declared(name, symbol)
            self._check_room(name, symbol, found)
            self._check_alignment(name, symbol, found)
        return Object(self.prog, found, address=symbol.address)

    def _prototype(self, name: str) -> Type | None:
        if name in FUNCTIONS:
            return self.prog.function_type(self.prog.void_type(), [], True)
        return self.types.find_function(name)

    def _declared(self, name: str, symbol: Symbol) -> Type:
        declared = TABLE.get(name)
        if declared is None:
            raise UntypedError(
                f"nothing tells the type of {name}: with BTF alone, name it yourself, "
                f"as in Object(prog, TYPE, address={symbol.address:#x})"
            )
        reasons = []
        for declaration in declared:
            try:
                return declaration.resolve(self.types)
            except LookupError as error:
                reasons.append(str(error))
        raise UntypedError(
            f"the type declared for {name} does not fit this kernel: "
            + "; ".join(reasons)
        )

    def _check_alignment(self, name: str, symbol: Symbol, variable_type: Type) -> None:
        if symbol.address % _alignment(variable_type):
            raise UntypedError(
                f"{name} lies at {symbol.address:#x}, where its declared type cannot"
            )

    def _check_room(self, name: str, symbol: Symbol, variable_type: Type) -> None:
        if not variable_type.is_complete():
            return
        size = sizeof(variable_type)
        same_place = self.symbols(self.prog, None, symbol.address, False)
        room = max(
            (other.size for other in same_place if other.address == symbol.address),
            default=0,
        )
        if size > (room or _UNKNOWN_ROOM):
            raise UntypedError(
                f"the type declared for {name} has {size} bytes, and the kernel "
                + (f"gives it {room}" if room else "does not tell how many it has")
            )


def _alignment(some: Type) -> int:
    """Return the alignment of a type, 1 if it is not known."""
    if some.kind in (TypeKind.TYPEDEF, TypeKind.ARRAY):
        return _alignment(some.type)
    if some.kind in (TypeKind.STRUCT, TypeKind.UNION):
        # Members may be packed; BTF does not say.
        return 1
    return sizeof(some) if some.is_complete() else 1
