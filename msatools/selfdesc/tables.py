# SPDX-License-Identifier: LGPL-2.1-or-later

"""Walks over tables of types and symbols in C (``_tables.c``), and indexes of names."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from msatools import native

Words = npt.NDArray[np.uint32]

NONE = 0xFFFFFFFF
"""Start of the name of a row that has none."""

NAME_LEN = 512
"""Bytes of a name, with its NUL: KSYM_NAME_LEN of include/linux/kallsyms.h, which the
kernel holds names in BTF to as well (kernel/bpf/btf.c, __btf_name_valid())."""

_VERSION = 1


class NoNameError(ValueError):
    """A row's name does not lie in the text; the argument is the row."""


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    loaded = native.load("msatools.selfdesc._tables", "msa_tables_version", _VERSION)
    if loaded is None:
        return None
    here, number, word = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
    for name, arguments in {
        "msa_walk_btf": (here, number, here, here, number, here, here, here),
        "msa_walk_names": (here, number, number, number, here),
        "msa_expand_names": (
            *(here, number, number, here, number, here),
            *(here, number, here),
        ),
        "msa_index_names": (here, number, here, number, here, word, here),
        "msa_find_name": (here, here, here, word, here, here, here, number),
    }.items():
        function = getattr(loaded, name)
        function.argtypes = arguments
        function.restype = number
    return loaded


def library() -> ctypes.CDLL | None:
    """Return the part in C; ``None`` if it was not built, or is not wanted."""
    return _loaded() if native.is_wanted() else None


def index_names(text: bytes, starts: Words) -> Callable[[str], list[int]]:
    """Return a function that finds the rows of a name, ascending.

    Names that are too long are not found: there may be many, and all of them the same
    few MiB of damaged text.

    :param text: All names, each with a NUL at its end.
    :param starts: Offset of each row's name, or :data:`NONE`.
    :raises NoNameError: if a name is not in the text
    """
    loaded = library()
    if loaded is None:
        return _index_in_python(text, starts)
    count = len(starts)
    mask = (1 << max(8, count.bit_length())) - 1
    heads, following = np.empty(mask + 1, np.uint32), np.empty(count, np.uint32)
    done = loaded.msa_index_names(
        text, len(text), at(starts), count, at(heads), mask, at(following)
    )
    if done < 0:
        raise NoNameError(-done - 1)
    rows = np.empty(8, np.uint32)

    def find(name: str) -> list[int]:
        nonlocal rows
        if "\0" in name:
            return []
        while True:
            found = loaded.msa_find_name(
                text,
                at(starts),
                at(heads),
                mask,
                at(following),
                name.encode("utf-8", "surrogateescape"),
                at(rows),
                len(rows),
            )
            if found <= len(rows):
                ascending: list[int] = rows[:found].tolist()
                return ascending
            rows = np.empty(found, np.uint32)

    return find


def _index_in_python(text: bytes, starts: Words) -> Callable[[str], list[int]]:
    rows: dict[bytes, list[int]] = {}
    for row, start in enumerate(starts.tolist()):
        if start == NONE:
            continue
        if start >= len(text):
            raise NoNameError(row)
        end = text.find(b"\0", start, start + NAME_LEN)
        if end < 0:
            continue
        rows.setdefault(text[start:end], []).append(row)

    def find(name: str) -> list[int]:
        return rows.get(name.encode("utf-8", "surrogateescape"), [])

    return find


def at(array: npt.NDArray[Any]) -> int:
    """Return where an array lies in memory; it has to be contiguous."""
    address: int = array.ctypes.data
    return address
