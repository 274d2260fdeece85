# SPDX-License-Identifier: LGPL-2.1-or-later

"""One program per dump for tests that damage it, restored after each test."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from drgn import Object, Program

from tests.support import overlay
from tests.support.dumps import open_dump

_original: dict[int, list[tuple[int, bytes]]] = {}
"""``id()`` of a program -> addresses and their original contents, in order."""


@contextmanager
def borrowed(name: str) -> Iterator[Program]:
    """Yield the program of a dump; damage it with the functions of this module."""
    prog, known = _opened(name)
    _original[id(prog)] = []
    try:
        yield prog
    finally:
        for address, data in reversed(_original.pop(id(prog))):
            overlay.put(prog, address, data)
        prog.cache.clear()
        prog.cache.update(known)


@cache
def _opened(name: str) -> tuple[Program, dict[object, object]]:
    """Open a dump; return its program and a copy of the program's cache."""
    prog = open_dump(name, "btf")
    return prog, dict(prog.cache)


def lose(prog: Program, address: int, size: int) -> None:
    """Make memory of a dump unreadable."""
    _keep(prog, address, size)
    overlay.lose(prog, address, size)


def put(prog: Program, address: int, data: bytes) -> None:
    """Replace memory of a dump by other data."""
    _keep(prog, address, len(data))
    overlay.put(prog, address, data)


def put_word(member: Object, value: int) -> None:
    """Overwrite a 64-bit variable or member."""
    assert member.address_ is not None
    data = (value % (1 << 64)).to_bytes(8, "little")
    put(member.prog_, member.address_, data)


def _keep(prog: Program, address: int, size: int) -> None:
    if id(prog) in _original:
        _original[id(prog)].append((address, prog.read(address, size)))
