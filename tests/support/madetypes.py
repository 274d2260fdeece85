# SPDX-License-Identifier: LGPL-2.1-or-later

"""Make programs with a few types and objects and no others.

Their memory is added by :func:`tests.support.overlay.put`.
"""

from collections.abc import Iterable, Mapping

from drgn import Architecture, Object, Platform, Program, Type, TypeKind, TypeMember


def made_program() -> Program:
    """Return an x86-64 program without types, objects or memory."""
    return Program(Platform(Architecture.X86_64))


def struct(
    prog: Program, tag: str, size: int, /, **members: tuple[Type | Object, int]
) -> Type:
    """Make a structure type.

    :param members: name -> (type or bit field, offset in bytes)
    """
    made = [
        TypeMember(kind, name, 8 * offset) for name, (kind, offset) in members.items()
    ]
    return prog.struct_type(tag, size, made)


def serve(
    prog: Program, types: Iterable[Type], objects: Mapping[str, Object] | None = None
) -> None:
    """Add types (by tag, typedefs by name) and objects (by name) to a program."""
    by_name = {
        type_.name if type_.kind == TypeKind.TYPEDEF else type_.tag: type_
        for type_ in types
    }

    def find_type(
        prog: Program, kinds: object, name: str, filename: str | None
    ) -> Type | None:
        found = by_name.get(name)
        return found if found and found.kind in kinds else None  # type: ignore[operator]

    prog.register_type_finder("made", find_type, enable_index=0)
    prog.register_object_finder(
        "made",
        lambda prog, name, flags, filename: (objects or {}).get(name),
        enable_index=0,
    )
