# SPDX-License-Identifier: LGPL-2.1-or-later

"""Kernels made by hand: programs that know a few types and objects, and no others.

Their memory is put in place by :func:`tests.support.overlay.put`.
"""

from collections.abc import Iterable, Mapping

from drgn import Architecture, Object, Platform, Program, Type, TypeKind, TypeMember


def made_program() -> Program:
    """Return a program for x86-64 that knows nothing."""
    return Program(Platform(Architecture.X86_64))


def struct(
    prog: Program, tag: str, size: int, /, **members: tuple[Type | Object, int]
) -> Type:
    """Make a structure type.

    :param members: By name, the type of each, or a bit field, and its offset in bytes.
    """
    made = [TypeMember(kind, name, 8 * at) for name, (kind, at) in members.items()]
    return prog.struct_type(tag, size, made)


def serve(
    prog: Program, types: Iterable[Type], objects: Mapping[str, Object] | None = None
) -> None:
    """Let a program find types by their tags, typedefs and objects by their names."""
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
