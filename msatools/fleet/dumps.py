# SPDX-License-Identifier: LGPL-2.1-or-later

"""The dumps that arguments name: files, folders, patterns, and a list."""

import glob
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from typing import NamedTuple

from msatools.fleet.errors import FleetError
from msatools.target.foreign import HEAD_BYTES, MEMORY_MAGICS, recognize
from msatools.target.raw.memory import FileMemory, MemoryRange
from msatools.target.raw.search import Words, find_words

STDIN = "-"
"""Word for a list on standard input, one path a line."""

_NAMES = (
    *("*vmcore*", "*.kdump", "*.core", "*.dump"),
    *("*.mem", "*.vmem", "*.lime", "memory-ranges"),
)
"""Names that dumps and files with memory have, whatever is in the file."""

_BESIDE = ("*dmesg*", "*.txt", "*.log", "*.json", "*.lock", ".*")
"""Names of files that tools write beside dumps."""

_LEAST_MEMORY, _MEMORY_UNIT = 32 << 20, 1 << 20
"""Minimum size of a file that is looked into, and what its size is a multiple of."""

_MOST_SEARCHED = 1 << 30
"""Bytes that are searched: less than a second."""

_MOST_EXTENTS = 1 << 16

_ELF, _KDUMP, _FLATTENED = b"\x7fELF", b"KDUMP   ", b"makedumpfile"
_ET_CORE = b"\x04\0"


Unread = Callable[[OSError], object]
"""Called for each folder that cannot be read."""

LeftOut = Callable[[str, str], object]
"""Called with the path of each file of a folder that is no dump, and what it is."""

NO_DUMP = "no dump"
"""The kind of a file that is no dump and of no known format."""


class Told(NamedTuple):
    """The callbacks for folders and files that give no dump."""

    unread: Unread = lambda error: None
    left_out: LeftOut = lambda path, what: None


_NOBODY = Told()


def find_dumps(
    words: Iterable[str],
    listed: Iterable[str] = (),
    told: Told = _NOBODY,
) -> Iterator[str]:
    """Yield the path of each dump once, in the order of the words.

    A file that is named is a dump. Of a folder those are that look like one; links to
    folders are not followed.

    :param listed: Lines of the list, if one of the words is ``-``.
    :param told: Called for each folder that cannot be read, and each file left out.
    :raises FleetError: if a word names nothing
    """
    seen: set[str] = set()
    for word in words:
        for path in _paths(word, listed, told):
            # A link, too, may lead to it.
            file = os.path.realpath(path)
            if file not in seen:
                seen.add(file)
                yield path


def _paths(word: str, listed: Iterable[str], told: Told) -> Iterator[str]:
    if word == STDIN:
        lines = (line.rstrip("\n") for line in listed)
        yield from (line for line in lines if line)
    elif os.path.isdir(word):
        yield from _in_folder(word, told)
    elif os.path.exists(word) or not glob.has_magic(word):
        # What is not there gets a row that says so.
        yield word
    else:
        found = sorted(_matching(word))
        if not found:
            raise FleetError(f"{word}: no such file; check the pattern")
        for path in found:
            yield from _in_folder(path, told) if os.path.isdir(path) else (path,)


def _matching(pattern: str) -> Iterator[str]:
    """Yield the paths that a pattern matches.

    At ``**`` no links to folders are followed, which glob.glob does: they may lead in
    circles, of which it finds each way round.
    """
    head, stars, tail = pattern.partition("**/")
    if not stars or (head and not head.endswith("/")):
        yield from glob.iglob(pattern)
        return
    for top in glob.iglob(head) if head else (os.curdir,):
        for folder, folders, _ in os.walk(top):
            folders[:] = [name for name in folders if not name.startswith(".")]
            rest = os.path.join(glob.escape(folder), tail)
            yield from _matching(rest if head else rest.removeprefix("./"))


def _in_folder(folder: str, told: Told) -> Iterator[str]:
    """Yield the dumps in a folder and those below it, in order."""
    for parent, folders, files in os.walk(folder, onerror=told.unread):
        folders.sort()
        for name in sorted(files):
            path = os.path.join(parent, name)
            if not os.path.isfile(path) or _is_beside(name):
                continue
            what = _what_else(name, path)
            if what is None:
                yield path
            else:
                told.left_out(path, what)


def _is_beside(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _BESIDE)


def _what_else(name: str, path: str) -> str | None:
    """Return what a file is that is no dump by its name or its start.

    :return: ``None`` for a dump, and for a file that cannot be read.
    """
    if any(fnmatch(name, pattern) for pattern in _NAMES):
        return None
    try:
        with open(path, "rb", buffering=0) as file:
            start = file.read(HEAD_BYTES)
    except OSError:
        return None
    # Programs and modules are ELF files as well.
    is_core = start.startswith(_ELF) and start[16:18] == _ET_CORE
    if is_core or start.startswith((_KDUMP, _FLATTENED, *MEMORY_MAGICS)):
        return None
    found = recognize(start)
    if found is not None:
        return found.what
    return None if _has_kernel(path) else NO_DUMP


def _has_kernel(path: str) -> bool:
    """Return whether a file of no known kind looks like a guest's memory.

    Its end is searched for VMCOREINFO: the kernel takes a page for it when hardly any
    is used, and the highest first. A file that is named is searched as a whole.
    """
    try:
        memory = FileMemory("raw memory", path)
        if memory.size < _LEAST_MEMORY or memory.size % _MEMORY_UNIT:
            return False
        extents = deque(memory.filled(), maxlen=_MOST_EXTENTS)
        ranges: list[MemoryRange] = []
        room = _MOST_SEARCHED
        while extents and room > 0:
            start, end = extents.pop()
            start = max(start, end - room)
            room -= end - start
            ranges.append(MemoryRange(start, end - start, start))
        searched = FileMemory("raw memory", path, ranges[::-1])
        return any(find_words(searched, [Words(0, b"OSRELEASE=")]))
    except OSError:
        return False
