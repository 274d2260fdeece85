# SPDX-License-Identifier: LGPL-2.1-or-later

"""Members of types at an offset, and the locks among them."""

from collections.abc import Iterator

import drgn
from drgn.helpers.common.type import member_at_offset
from msgspec import Struct

from msatools.locks.base.lock import LockTypeName
from msatools.selfdesc.find import ask

LOCKS: dict[str, LockTypeName] = {
    "mutex": "mutex",
    "ww_mutex": "ww_mutex",
    "rw_semaphore": "rwsem",
    "semaphore": "semaphore",
    "rt_mutex": "rt_mutex",
    "rt_mutex_base": "rt_mutex",
    "percpu_rw_semaphore": "percpu_rwsem",
    "spinlock": "spinlock",
    "raw_spinlock": "spinlock",
    "qspinlock": "spinlock",
    "completion": "completion",
    "wait_queue_head": "wait_queue",
}
"""Maps the tag of a lock's structure to its type."""

_STRUCTURES = (drgn.TypeKind.STRUCT, drgn.TypeKind.UNION)


class LockMember(Struct, frozen=True):
    """A lock that is a member of a structure, or a variable."""

    type: LockTypeName
    offset: int
    """Offset of the lock in the structure."""


def lock_at(type_: drgn.Type, offset: int) -> LockMember | None:
    """Return the outermost lock that contains the byte at an offset, if there is one.

    A mutex contains a spinlock and a queue, which are not of interest by themselves.
    """
    for start, inner in _around(type_, offset):
        if inner.kind == drgn.TypeKind.STRUCT and inner.tag in LOCKS:
            return LockMember(LOCKS[inner.tag], start)
    return None


def member_at(type_: drgn.Type, offset: int) -> str | None:
    """Return the member at an offset, and how far it is from the start of it.

    Several members of a union are all named: ``a or b``.

    :return: ``None`` if there is no member, or the type has none.
    """
    if type_.kind not in (*_STRUCTURES, drgn.TypeKind.ARRAY):
        return None
    name = ask(member_at_offset, type_, offset)
    return None if not name or name.startswith("<") else name


def _around(type_: drgn.Type, offset: int) -> Iterator[tuple[int, drgn.Type]]:
    """Yield the types that contain the byte at an offset, the outermost first.

    :return: Offset of the start of each in the type, and the type.
    """
    base, inner = 0, _bare(type_)
    while True:
        yield base, inner
        if inner.kind in _STRUCTURES and inner.is_complete():
            member = _member(inner, offset - base)
            if member is None:
                return
            base += member.bit_offset // 8
            inner = _bare(member.type)
        elif inner.kind == drgn.TypeKind.ARRAY and inner.length and _has_size(inner):
            size = drgn.sizeof(inner.type)
            base += min((offset - base) // size, inner.length - 1) * size
            inner = _bare(inner.type)
        else:
            return


def _member(type_: drgn.Type, offset: int) -> "drgn.TypeMember | None":
    """Return the member that contains an offset; of a union's the first."""
    for member in type_.members or ():
        start = member.bit_offset // 8
        try:
            size = drgn.sizeof(member.type)
        except TypeError:
            continue
        if start <= offset < start + max(size, 1) and size:
            return member
    return None


def _has_size(array: drgn.Type) -> bool:
    return bool(array.type.is_complete() and drgn.sizeof(array.type))


def _bare(type_: drgn.Type) -> drgn.Type:
    while type_.kind == drgn.TypeKind.TYPEDEF:
        type_ = type_.type
    return type_
