# SPDX-License-Identifier: LGPL-2.1-or-later

"""drgn's types from BTF, and the kernel's variables, functions and constants.

A variable has the type that ``globals.txt`` declares, if its room and alignment fit.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path

from drgn import (
    Architecture,
    FindObjectFlags,
    Object,
    Program,
    Qualifiers,
    Symbol,
    SymbolKind,
    Type,
    TypeEnumerator,
    TypeKind,
    TypeKindSet,
    TypeMember,
    TypeParameter,
    sizeof,
)
from msgspec import Struct

from msatools.errors import AmbiguousError, MissingError, NotSoError, UntypedError
from msatools.selfdesc.btf import Btf, BtfError, BtfKind, MemberCounts, agree
from msatools.selfdesc.find import alignment, find_type, member_of
from msatools.selfdesc.tables import (
    MAX_SWAPFILES,
    Symbols,
    counted,
    max_swapfiles,
    room_of,
)
from msatools.standby import NAME

# --- drgn's types, created from BTF when needed.


_KINDS = {
    TypeKind.INT: (BtfKind.INT,),
    TypeKind.BOOL: (BtfKind.INT,),
    TypeKind.FLOAT: (BtfKind.FLOAT,),
    TypeKind.STRUCT: (BtfKind.STRUCT,),
    TypeKind.UNION: (BtfKind.UNION,),
    TypeKind.ENUM: (BtfKind.ENUM, BtfKind.ENUM64),
    TypeKind.TYPEDEF: (BtfKind.TYPEDEF,),
}
"""Kinds of BTF for each kind that drgn finds by name; a FWD is not a definition."""

_QUALIFIERS = {
    BtfKind.CONST: Qualifiers.CONST,
    BtfKind.VOLATILE: Qualifiers.VOLATILE,
    BtfKind.RESTRICT: Qualifiers.RESTRICT,
}
_SIGNED_CHAR = {Architecture.X86_64, Architecture.I386}
KEYWORDS = {"struct": TypeKind.STRUCT, "union": TypeKind.UNION, "enum": TypeKind.ENUM}
_DECLARATION = re.compile(
    r"(?P<const>const )?(?P<name>\w+(?: \w+)*?)(?P<pointers>(?: ?\*(?: ?const)?)*)"
)
_POINTER = re.compile(r"\*( ?const)?")
_SPELLINGS = {
    "short": ("short int", "short"),
    "unsigned short": ("short unsigned int", "unsigned short"),
    "long": ("long int", "long"),
    "unsigned long": ("long unsigned int", "unsigned long"),
    "long long": ("long long int", "long long"),
    "unsigned long long": ("long long unsigned int", "unsigned long long"),
}
"""Names of C's integer types in GCC's and in Clang's BTF."""

_FINDERS = frozenset({"dwarf", NAME})
"""Names of drgn's finder of types in debug info, and of msatools' finder."""

_MAX_DEPTH = 64
"""Maximum nesting of declarators; C sources have about five levels."""


class BtfTypes:
    """drgn's types of one blob, each created once.

    Types of members are created lazily, so that a structure does not pull in all types
    that it points to.

    :param base: Returns types of the base blob by ID, if *btf* is split BTF.
    """

    def __init__(
        self, prog: Program, btf: Btf, base: Callable[[int], Type] | None = None
    ) -> None:
        self.prog = prog
        self.btf = btf
        self._base = base
        self._member_counts = MemberCounts(btf)
        self._types: dict[int, Type] = {}
        # By the member's type: most members have one of a few types.
        self._bit_fields: dict[int, tuple[int, int]] = {}
        self._found: dict[tuple[str, Set[TypeKind]], Type | None] = {}
        self._depth = 0
        self._constants: dict[str, Object | None] = {}

    def find(self, kinds: Collection[TypeKind], name: str) -> Type | None:
        """Find a type by its name; ``None`` if not found.

        :raises AmbiguousError: if different types have the name
        :raises BtfError: if a type of that name is damaged
        """
        # Most lookups are repeated: with each sample of a running kernel.
        key = name, kinds if isinstance(kinds, TypeKindSet) else frozenset(kinds)
        if key not in self._found:
            self._found[key] = self._find(kinds, name)
        return self._found[key]

    def _find(self, kinds: Collection[TypeKind], name: str) -> Type | None:
        ids = self.btf.find(
            name, *{btf_kind for kind in kinds for btf_kind in _KINDS.get(kind, ())}
        )
        if TypeKind.BOOL not in kinds or TypeKind.INT not in kinds:
            ids = [i for i in ids if self._is_wanted_int(i, kinds)]
        if not ids:
            return None
        self._check_unambiguous(name, ids)
        return self.type(ids[0])

    def parse(self, text: str) -> Type:
        """Return the type of a C declaration, from the types of this blob only.

        drgn's own ``prog.type()`` parses more of C, but also uses types from other
        sources that were loaded earlier, such as the sign of ``char``. It is called if
        another program's finder serves types, so that a variable has the same type as
        a lookup by name returns.

        :param text: A type, optionally ``const``, followed by any pointers.
        :raises MissingError: if the type is not found, or ambiguous
        """
        if {*self.prog.enabled_type_finders()} - _FINDERS:
            return find_type(self.prog, text)
        match = _DECLARATION.fullmatch(text)
        if match is None:
            raise MissingError(f"not a type that can be declared: {text}")
        made = self._named(match["name"])
        if match["const"]:
            made = made.qualified(Qualifiers.CONST)
        for pointer in _POINTER.findall(match["pointers"]):
            made = self.prog.pointer_type(made)
            if pointer:
                made = made.qualified(Qualifiers.CONST)
        return made

    def _named(self, text: str) -> Type:
        keyword, _, name = text.rpartition(" ")
        if keyword in KEYWORDS:
            found = self.find({KEYWORDS[keyword]}, name)
        elif text == "void":
            return self.prog.void_type()
        else:
            found = self.find({TypeKind.TYPEDEF}, text)
            for spelling in _SPELLINGS.get(text, (text,)):
                found = found or self.find({TypeKind.INT, TypeKind.BOOL}, spelling)
        if found is None:
            raise MissingError(f"BTF has no type {text}")
        return found

    def find_constant(self, name: str) -> Object | None:
        """Find an enumerator by its name; ``None`` if not found.

        :raises AmbiguousError: if there are several values, or the value is not certain
        """
        if name not in self._constants:
            self._constants[name] = self._make_constant(name)
        return self._constants[name]

    def _make_constant(self, name: str) -> Object | None:
        ids = self.btf.find_enumerations(name)
        values = {
            value
            for type_id in ids
            for enumerator, value in self.btf.enumerators(type_id)
            if enumerator == name
        }
        if len(values) > 1:
            raise AmbiguousError(f"BTF has several constants {name}: {sorted(values)}")
        if not all(self.btf.is_value_told(i, value) for i in ids for value in values):
            raise AmbiguousError(f"BTF this old does not have the value of {name}")
        return Object(self.prog, self.type(ids[0]), values.pop()) if values else None

    def find_function(self, name: str) -> Type | None:
        """Find a function's prototype by its name; ``None`` if not found.

        :raises AmbiguousError: if functions of that name have different prototypes
        """
        ids = self.btf.find_functions(name)
        if not ids:
            return None
        self._check_unambiguous(name, ids)
        return self.type(self.btf.target(ids[0]))

    def find_variable(self, name: str) -> Type | None:
        """Find a variable's type by its name; ``None`` if not found.

        BTF has the types of per-CPU variables only.

        :raises AmbiguousError: if several variables have the name
        """
        ids = self.btf.find(name, BtfKind.VAR)
        if len(ids) > 1:
            raise AmbiguousError(f"BTF has {len(ids)} variables {name}")
        return self.type(self.btf.target(ids[0])) if ids else None

    def find_anonymous(self, members: list[str]) -> Type:
        """Find the unnamed structure with exactly these members, in this order.

        :raises MissingError: if there is no such structure, or more than one
        """
        ids = [*self.btf.unnamed(BtfKind.STRUCT, members)]
        if len(ids) != 1:
            raise MissingError(
                f"BTF has {len(ids)} structures without a name of {', '.join(members)}"
            )
        return self.type(ids[0])

    def type(self, type_id: int) -> Type:
        """Return drgn's type for the ID of a type in BTF.

        :raises BtfError: if that type is damaged
        """
        made = self._types.get(type_id)
        if made is None:
            if self._depth > _MAX_DEPTH:
                raise BtfError(f"type {type_id} has no end")
            self._depth += 1
            try:
                made = self._make(type_id)
            finally:
                self._depth -= 1
            self._types[type_id] = made
        return made

    def _make(self, type_id: int) -> Type:
        prog, btf = self.prog, self.btf
        if type_id < btf.first_id and self._base is not None:
            return self._base(type_id)
        match btf.kind(type_id):
            case BtfKind.VOID:
                return prog.void_type()
            case BtfKind.INT:
                return self._int(type_id)
            case BtfKind.FLOAT:
                return prog.float_type(
                    btf.name(type_id), btf.size(type_id), btf.byteorder
                )
            case BtfKind.PTR:
                return prog.pointer_type(self.type(btf.target(type_id)))
            case BtfKind.ARRAY:
                return self._array(type_id)
            case BtfKind.STRUCT | BtfKind.UNION:
                return self._compound(type_id)
            case BtfKind.ENUM | BtfKind.ENUM64:
                return self._enum(type_id)
            case BtfKind.FWD:
                make = prog.union_type if btf.is_union(type_id) else prog.struct_type
                return make(btf.name(type_id) or None)
            case BtfKind.TYPEDEF:
                return prog.typedef_type(
                    btf.name(type_id), self.type(btf.target(type_id))
                )
            case BtfKind.CONST | BtfKind.VOLATILE | BtfKind.RESTRICT as kind:
                qualified = self.type(btf.target(type_id))
                return qualified.qualified(qualified.qualifiers | _QUALIFIERS[kind])
            case BtfKind.TYPE_TAG:
                return self.type(btf.target(type_id))
            case BtfKind.FUNC_PROTO:
                return self._prototype(type_id)
            case kind:
                raise BtfError(f"{kind.name} {type_id} stands where a type should")

    def _int(self, type_id: int) -> Type:
        name, described = self.btf.name(type_id), self.btf.as_int(type_id)
        if described.is_bool:
            return self.prog.bool_type(name, described.size, self.btf.byteorder)
        is_signed = described.is_signed
        is_char = name in ("char", "signed char")
        if is_char and not is_signed and not self._has_sign_of_char():
            is_signed = name == "signed char" or self._is_char_signed()
        return self.prog.int_type(name, described.size, is_signed, self.btf.byteorder)

    def _has_sign_of_char(self) -> bool:
        """Return whether the blob has the sign of character types.

        pahole lost it in the BTF of Debian's 5.10: there "signed char" is unsigned.
        """
        btf = self.btf.base or self.btf
        ids = btf.find("signed char", BtfKind.INT)
        return bool(ids) and all(btf.as_int(type_id).is_signed for type_id in ids)

    def _is_char_signed(self) -> bool:
        """Return whether a plain char is signed by the architecture's convention.

        For kernels older than 6.2 only: since then it is unsigned everywhere (commit
        3bc753c06dd0 "kbuild: treat char as always unsigned").
        """
        platform = self.prog.platform
        return platform is not None and platform.arch in _SIGNED_CHAR

    def _array(self, type_id: int) -> Type:
        element, length = self.btf.as_array(type_id)
        element_type = self.type(element)
        if length == 0:
            # BTF does not distinguish "[]" from "[0]"; nearly all are flexible array
            # members, for which compilers emit DWARF's "[]".
            return self.prog.array_type(element_type)
        return self.prog.array_type(element_type, length)

    def _compound(self, type_id: int) -> Type:
        btf = self.btf
        is_union = btf.kind(type_id) == BtfKind.UNION
        make = self.prog.union_type if is_union else self.prog.struct_type
        size = btf.size(type_id)
        self._member_counts.check(type_id)
        members = []
        bit_fields, member_object = self._bit_fields, self._member_object
        # No Python function is called per member: a report makes thousands of members.
        for name, member_type, bit_offset, bit_field_size in btf.members(type_id):
            if bit_offset > size * 8:
                raise BtfError(f"{name} lies outside of type {type_id}")
            if not bit_field_size:
                if member_type not in bit_fields:
                    bit_fields[member_type] = self._bit_field(member_type)
                more, bit_field_size = bit_fields[member_type]
                bit_offset += more
            found = partial(
                member_object, member_type, bit_offset, bit_field_size, size
            )
            members.append(TypeMember(found, name or None, bit_offset))
        return make(btf.name(type_id) or None, size, members)

    def _bit_field(self, type_id: int) -> tuple[int, int]:
        """Return offset and size in bits of the bit-field that an integer type is.

        Both are 0 if the type is none.

        Before the bit-field flag (9d5f9f701b18 "bpf: btf: fix struct/union/fwd types
        with kind_flag", in 5.0), the integer type described the bit-field.
        """
        if self.btf.kind(type_id) != BtfKind.INT:
            return 0, 0
        described = self.btf.as_int(type_id)
        if described.bits == described.size * 8:
            return 0, 0
        return described.offset, described.bits

    def _member_object(
        self, type_id: int, bit_offset: int, bit_field_size: int, room: int
    ) -> Object | Type:
        member_type = self.type(type_id)
        if bit_field_size:
            end = bit_offset + bit_field_size
        else:
            end = bit_offset + 8 * _size(member_type)
        if end > room * 8:
            raise BtfError(f"a member of type {type_id} reaches out of its structure")
        if not bit_field_size:
            return member_type
        try:
            return Object(self.prog, member_type, bit_field_size=bit_field_size)
        except ValueError as error:
            raise BtfError(f"type {type_id}: {error}") from error

    def _enum(self, type_id: int) -> Type:
        btf, prog = self.btf, self.prog
        name, size = btf.name(type_id) or None, btf.size(type_id)
        enumerators = [TypeEnumerator(*pair) for pair in btf.enumerators(type_id)]
        if not enumerators:
            return prog.enum_type(name)
        is_signed = btf.is_signed_enum(type_id)
        spelling = {1: "char", 2: "short", 4: "int", 8: "long"}.get(size)
        if spelling is None:
            raise BtfError(f"enumeration {type_id} has {size} bytes")
        # BTF lacks the name of the integer type; only its size and sign matter.
        compatible = prog.int_type(
            spelling if is_signed else f"unsigned {spelling}",
            size,
            is_signed,
            btf.byteorder,
        )
        return prog.enum_type(name, compatible, enumerators)

    def _prototype(self, type_id: int) -> Type:
        parameters, is_variadic = self.btf.parameters(type_id)
        return self.prog.function_type(
            self.type(self.btf.target(type_id)),
            [
                TypeParameter(partial(self.type, parameter.type_id), parameter.name)
                for parameter in parameters
            ],
            is_variadic,
        )

    def _is_wanted_int(self, type_id: int, kinds: Collection[TypeKind]) -> bool:
        if self.btf.kind(type_id) != BtfKind.INT:
            return True
        is_bool = self.btf.as_int(type_id).is_bool
        return (TypeKind.BOOL if is_bool else TypeKind.INT) in kinds

    def _check_unambiguous(self, name: str, ids: list[int]) -> None:
        if len(ids) > 1 and not agree(self.btf, ids):
            raise AmbiguousError(f"BTF has {len(ids)} different types {name}")


def _size(kind_of_type: Type) -> int:
    """Return a type's size in bytes; 0 for flexible arrays and incomplete types."""
    if not kind_of_type.is_complete():
        return 0
    try:
        size: int = sizeof(kind_of_type)
    except (TypeError, OverflowError) as error:
        raise BtfError(str(error)) from error
    return size


# --- Types of variables as globals.txt declares them, resolved for a kernel.


_COUNTED = re.compile(r"(\d*)\*")
"""Array length ``*`` or ``N*``: a multiple of N that follows from the array's room."""


class Declaration(Struct, frozen=True):
    """One line of ``globals.txt``."""

    name: str
    element: str
    """The type in C, without array lengths."""

    lengths: tuple[str, ...] = ()
    """Array lengths, the outermost first: a number; an enumerator; ``type.member``, an
    array of the same length; empty if unknown; ``*``, ``32*`` or ``MAX_SWAPFILES`` if
    the length follows from the room."""

    condition: str = ""
    """A type, ``type.member``, enumerator or ``function()`` that must exist, or with
    ``!`` must not exist; empty if the line holds for all kernels."""

    @property
    def multiple(self) -> int | None:
        """N of a length ``N*``, and 1 of ``*``; ``None`` for other lengths.

        See :func:`.tables.counted`, which derives the length from the room.
        """
        found = _COUNTED.fullmatch(self.lengths[0]) if self.lengths else None
        return int(found[1] or 1) if found else None

    @property
    def is_of_swapfiles(self) -> bool:
        """Whether it is an array of MAX_SWAPFILES elements."""
        return self.lengths[:1] == (MAX_SWAPFILES,)

    def resolve(self, types: BtfTypes) -> Type:
        """Build the type; an array has no length if that follows from its room.

        :raises MissingError: if the condition is not met, or the kernel lacks a type
            or constant that the declaration names
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
    """Return whether the kernel meets a :attr:`Declaration.condition`.

    :raises AmbiguousError: if a name in it is ambiguous
    """
    negated = condition.startswith("!")
    type_name, _, member = condition.lstrip("!").partition(".")
    if type_name.endswith("()"):
        return (types.find_function(type_name[:-2]) is not None) != negated
    if " " not in type_name:
        return (types.find_constant(type_name) is not None) != negated
    keyword, _, name = type_name.partition(" ")
    found = types.find({KEYWORDS[keyword]}, name)
    exists = found is not None and (not member or found.has_member(member))
    return exists != negated


def _length(types: BtfTypes, length: str) -> tuple[int, ...]:
    if not length or length == MAX_SWAPFILES or _COUNTED.fullmatch(length):
        return ()
    if length.isdigit():
        return (int(length),)
    type_name, _, member = length.partition(".")
    if member:
        return _length_of_member(types, type_name, member)
    constant = types.find_constant(length)
    if constant is None:
        raise MissingError(f"BTF has no constant {length}")
    return (int(constant),)


def _length_of_member(types: BtfTypes, type_name: str, member: str) -> tuple[int, ...]:
    """Return the length of a member that is an array, as a tuple of one number.

    :raises MissingError: if there is no such array, or it has no length
    """
    array = member_of(types.parse(type_name), member).type
    if array.kind != TypeKind.ARRAY or not array.length:
        raise MissingError(f"{type_name}.{member} is no array of a known length")
    return (array.length,)


class Declarations(Mapping[str, tuple[Declaration, ...]]):
    """Declarations by name of the variable, in the order of their lines.

    A line is parsed when its variable is looked up, as a run looks up few.

    :param text: Lines of ``type | name`` or ``type | name | condition``.
    :raises ValueError: if a line is malformed
    """

    def __init__(self, text: str) -> None:
        self._lines: dict[str, list[list[str]]] = {}
        for line in text.splitlines():
            if not line or line.startswith("#"):
                continue
            fields = line.split(" | ")
            if not 2 <= len(fields) <= 3 or not all(fields):
                raise ValueError(f"not a declaration: {line}")
            self._lines.setdefault(fields[1], []).append(fields)

    def __getitem__(self, name: str) -> tuple[Declaration, ...]:
        return tuple(
            Declaration(
                name,
                type_name.partition("[")[0].strip(),
                tuple(re.findall(r"\[([\w .]*\*?)\]", type_name)),
                *condition,
            )
            for type_name, _, *condition in self._lines[name]
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)


FUNCTIONS = frozenset({"vmemmap_populate"})
"""Functions that older BTF (5.10) lacks. Callers need no type, so it is a dummy."""

_VARIABLES = Path(__file__).with_name("globals.txt")
"""File of the declarations; it describes its own format."""

TABLE = Declarations(_VARIABLES.read_text("ascii"))


# --- The kernel's variables, functions and constants, found without debug info.
#
# A lookup has three distinct outcomes: the object; None, if this kernel does not have
# it; and an error, if it exists but its type or value is not certain. Types and values
# are never guessed.


# Plain integers: an operation on the enum's members creates an object each time.
_CONSTANT = FindObjectFlags.CONSTANT.value
_FUNCTION = FindObjectFlags.FUNCTION.value
_VARIABLE = FindObjectFlags.VARIABLE.value

_UNKNOWN_ROOM = 1 << 17
"""Maximum size in bytes of a variable whose room is unknown. drgn records no size for a
symbol that is 64 KiB or more before the next (MAX_SYMBOL_LENGTH), such as hstates with
1,024 nodes."""


_MOST_SHOWN = 4
"""Maximum number of a symbol's addresses that an error message lists."""


class Objects:
    """The variables, functions and constants of the kernel proper.

    Types come from BTF (constants, per-CPU variables, functions) or else from
    the declarations in ``globals.txt``; addresses from *symbols*.
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
        places = sorted({symbol.address for symbol in symbols})
        if len(places) > 1:
            shown = " or ".join(map(hex, places[:_MOST_SHOWN]))
            raise AmbiguousError(
                f"the kernel has {len(symbols)} symbols {name}: load the kernel's "
                f"debug info (-s), or name one: Object(prog, TYPE, address={shown})"
            )
        symbol = symbols[0]
        # Variables first: BTF has few, but finding a function indexes all functions.
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
            if declaration.is_of_swapfiles:
                length = self._swapfiles
                return self.prog.array_type(found.type, length) if length else found
            multiple = declaration.multiple
            if multiple is None:
                return found
            room = self._room(symbol)
            return counted(self.prog, symbol, found, multiple, room)
        raise UntypedError(
            f"the type declared for {name} does not fit this kernel: "
            + "; ".join(reasons)
        )

    @cached_property
    def _swapfiles(self) -> int | None:
        """MAX_SWAPFILES, from the rooms of arrays with that length; or ``None``."""
        arrays = []
        for name, declarations in TABLE.items():
            # Few lookups: those of all variables in the table would take 25 ms.
            if not declarations[0].is_of_swapfiles:
                continue
            found = self.symbols(self.prog, name, None, False)
            if len(found) != 1:
                continue
            for declaration in declarations:
                with suppress(MissingError):
                    element = declaration.resolve(self.types).type
                    arrays.append((found[0], sizeof(element)))
                    break
        return max_swapfiles(
            self.prog,
            self.symbols,
            arrays,
            is_exclusive=self.types.find_constant("PG_anon_exclusive") is not None,
        )

    def _room(self, symbol: Symbol) -> int:
        return room_of(self.prog, self.symbols, symbol)

    def _check_alignment(self, name: str, symbol: Symbol, variable_type: Type) -> None:
        if symbol.address % alignment(variable_type):
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
