# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel's variables, functions and constants, found without debug info.

A lookup has three distinct outcomes: the object; ``None``, if this kernel does not have
it; and an error, if it exists but its type or value is not certain. These are never
guessed.
"""

from drgn import (
    FaultError,
    FindObjectFlags,
    Object,
    Program,
    Symbol,
    SymbolKind,
    Type,
    TypeKind,
    sizeof,
)

from msatools.errors import MissingError, UncertainNameError
from msatools.selfdesc import declarations
from msatools.selfdesc.symbol_table import Symbols, SymbolTable
from msatools.selfdesc.types import AmbiguousError, BtfTypes

# Integers, as each operation on the flags themselves creates an object.
_CONSTANT = FindObjectFlags.CONSTANT.value
_FUNCTION = FindObjectFlags.FUNCTION.value
_VARIABLE = FindObjectFlags.VARIABLE.value

_UNKNOWN_ROOM = 0x10000
"""Distance to the next symbol from which drgn gives none a size (MAX_SYMBOL_LENGTH)."""


class UntypedError(UncertainNameError):
    """A symbol exists, but its type is not certain."""


class Objects:
    """The variables, functions and constants of the kernel proper.

    Types come from BTF (constants, per-CPU variables, functions) or else from
    :mod:`msatools.selfdesc.declarations`; addresses from *symbols*.
    """

    def __init__(self, prog: Program, types: BtfTypes, symbols: Symbols) -> None:
        self.prog = prog
        self.types = types
        self.symbols = symbols
        self._found: dict[str, Object | None] = {}

    def find(self, name: str, flags: FindObjectFlags) -> Object | None:
        """Find an object of the requested kinds; ``None`` if the kernel lacks it.

        :raises MissingError: if it exists, but its type or value is not certain
        """
        found, bits = None, flags.value
        if bits & (_FUNCTION | _VARIABLE):
            if name not in self._found:
                self._found[name] = self._at_symbol(name)
            found = self._found[name]
            is_function = found is not None and found.type_.kind == TypeKind.FUNCTION
            if not bits & (_FUNCTION if is_function else _VARIABLE):
                found = None
        if found is None and bits & _CONSTANT:
            found = self.types.find_constant(name)
        return found

    def _at_symbol(self, name: str) -> Object | None:
        symbols = self.symbols(self.prog, name, None, False)
        if not symbols:
            return None
        if len({symbol.address for symbol in symbols}) > 1:
            raise AmbiguousError(f"the kernel has {len(symbols)} symbols {name}")
        symbol = symbols[0]
        # BTF has few variables, but finding a function indexes all functions.
        found = self.types.find_variable(name)
        if found is None and symbol.kind != SymbolKind.OBJECT:
            found = self._prototype(name)
        if found is None:
            found = self._declared(name, symbol)
            self._check_room(name, symbol, found)
            self._check_alignment(name, symbol, found)
        return Object(self.prog, found, address=symbol.address)

    def _prototype(self, name: str) -> Type | None:
        if name in declarations.FUNCTIONS:
            return self.prog.function_type(self.prog.void_type(), [], True)
        return self.types.find_function(name)

    def _declared(self, name: str, symbol: Symbol) -> Type:
        declared = declarations.TABLE.get(name)
        if declared is None:
            raise UntypedError(
                f"nothing says the type of {name}: load the kernel's debug info (-s), "
                f"or name it: Object(prog, TYPE, address={symbol.address:#x})"
            )
        reasons = []
        for declaration in declared:
            try:
                found = declaration.resolve(self.types)
            except MissingError as error:
                reasons.append(str(error))
                continue
            multiple = declaration.multiple
            return found if multiple is None else self._counted(symbol, found, multiple)
        raise UntypedError(
            f"the type declared for {name} does not fit this kernel: "
            + "; ".join(reasons)
        )

    def _counted(self, symbol: Symbol, array: Type, multiple: int) -> Type:
        """Return an array with its length; without one if it cannot be read."""
        size, room = sizeof(array.type), self._room(symbol)
        if multiple > 1:
            # What is left is padding, which is less than so many elements.
            length = room // (size * multiple) * multiple
            return self.prog.array_type(array.type, length) if length else array
        try:
            data = self.prog.read(symbol.address, room)
        except FaultError:
            return array
        # What is no whole element is padding.
        filled = len(data[: len(data) // size * size].rstrip(b"\0"))
        if not filled:
            return array
        # A string ends with a NUL, which is a part of it.
        length = min(filled + 1, room) if size == 1 else -(-filled // size)
        return self.prog.array_type(array.type, length)

    def _room(self, symbol: Symbol) -> int:
        """Return the bytes up to the next symbol; 0 if unknown."""
        if isinstance(self.symbols, SymbolTable):
            _, following = self.symbols.before(symbol.address)
            return following - symbol.address if following is not None else 0
        same_place = self.symbols(self.prog, None, symbol.address, False)
        return max(
            (other.size for other in same_place if other.address == symbol.address),
            default=0,
        )

    def _check_alignment(self, name: str, symbol: Symbol, variable_type: Type) -> None:
        if symbol.address % _alignment(variable_type):
            raise UntypedError(
                f"{name} lies at {symbol.address:#x}, where its declared type cannot"
            )

    def _check_room(self, name: str, symbol: Symbol, variable_type: Type) -> None:
        if not variable_type.is_complete():
            return
        size, room = sizeof(variable_type), self._room(symbol)
        if size > (room or _UNKNOWN_ROOM):
            raise UntypedError(
                f"the type declared for {name} has {size} bytes, and the kernel "
                + (f"gives it {room}" if room else "does not say how many it has")
            )


def _alignment(some: Type) -> int:
    """Return the alignment of a type; 1 if unknown."""
    if some.kind in (TypeKind.TYPEDEF, TypeKind.ARRAY):
        return _alignment(some.type)
    if some.kind in (TypeKind.STRUCT, TypeKind.UNION):
        # It may be packed, which BTF does not record.
        return 1
    return sizeof(some) if some.is_complete() else 1
