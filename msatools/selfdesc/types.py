# SPDX-License-Identifier: LGPL-2.1-or-later

"""drgn's types, created from BTF when needed."""

import re
from collections.abc import Callable, Collection, Set
from functools import partial

from drgn import (
    Architecture,
    Object,
    Program,
    Qualifiers,
    Type,
    TypeEnumerator,
    TypeKind,
    TypeKindSet,
    TypeMember,
    TypeParameter,
    sizeof,
)

from msatools.errors import MissingError, UncertainNameError
from msatools.selfdesc.btf import Btf, BtfError, BtfKind, Member
from msatools.selfdesc.find import find_type
from msatools.selfdesc.type_compare import MemberCounts, agree
from msatools.standby import NAME

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
KEYWORDS = {
    "struct": TypeKind.STRUCT,
    "union": TypeKind.UNION,
    "enum": TypeKind.ENUM,
}
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
"""drgn's own finder of types that debug info has, and the one that serves these."""

_MAX_DEPTH = 64
"""Maximum nesting of declarators; C sources have about five levels."""


class AmbiguousError(UncertainNameError):
    """A name has several meanings, or its value is not certain."""


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
        # Most members have one of a few types.
        self._bit_fields: dict[int, tuple[int, int]] = {}
        self._found: dict[tuple[str, Set[TypeKind]], Type | None] = {}
        self._depth = 0
        self._constants: dict[str, Object | None] = {}

    def find(self, kinds: Collection[TypeKind], name: str) -> Type | None:
        """Find a type by its name; ``None`` if not found.

        :raises AmbiguousError: if different types have the name
        :raises BtfError: if the blob is damaged there
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
        sources that were loaded earlier, such as the sign of ``char``. It is asked if
        somebody else's finder serves types, so that a variable and a lookup by name
        have the same type.

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
        """Return the type of an ID.

        :raises BtfError: if the blob is damaged there
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

        The pahole that made Debian's 5.10 lost it: its "signed char" is unsigned.
        """
        btf = self.btf.base or self.btf
        ids = btf.find("signed char", BtfKind.INT)
        return bool(ids) and all(btf.as_int(type_id).is_signed for type_id in ids)

    def _is_char_signed(self) -> bool:
        """Return whether a plain char is signed by the architecture's convention.

        Only such old kernels need it: since Linux 6.2 it is unsigned everywhere (commit
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
        for member in btf.members(type_id):
            if member.bit_offset > size * 8:
                raise BtfError(f"{member.name} lies outside of type {type_id}")
            members.append(self._member(member, size))
        return make(btf.name(type_id) or None, size, members)

    def _member(self, member: Member, room: int) -> TypeMember:
        name, type_id, bit_offset, bit_field_size = member
        if not bit_field_size:
            if type_id not in self._bit_fields:
                self._bit_fields[type_id] = self._bit_field(type_id)
            more, bit_field_size = self._bit_fields[type_id]
            bit_offset += more
        make = partial(self._member_object, type_id, bit_offset, bit_field_size, room)
        return TypeMember(make, name or None, bit_offset)

    def _bit_field(self, type_id: int) -> tuple[int, int]:
        """Return the offset and the size of the bit-field that a type is; 0 if none.

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
