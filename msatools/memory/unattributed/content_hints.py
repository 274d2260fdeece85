# SPDX-License-Identifier: LGPL-2.1-or-later

"""
What the contents of pages tell of who uses them.

Pointers do: into a module, to a function or variable of the kernel, into memory of a
slab cache. Where there are none, text may.
"""

import re
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.mm import pfn_to_virt

from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.memory.scan.context import ScanContext
from msatools.memory.unattributed.model import PageWord
from msatools.memory.unattributed.slabnames import SlabNames, page_numbers
from msatools.memory.unattributed.symbolnames import SymbolNames
from msatools.selfdesc.variables import find_variable

Numbers = npt.NDArray[np.int64]

_AT_ONCE = 256
"""Pages that are looked through at a time: 1 MiB."""

_LAST = np.uint64(0xFFFF_FFFF_FFFF_F000)
"""From here on it is an error number, or -1."""

_MAX_PFNS = 1 << 20
"""Pages that pointers are to, of which it is remembered whose they are."""

_MAX_WORDS = 1 << 16
"""Different words that are kept; a kernel has more symbols than are worth telling."""

_WORDS_OF_BLOCK = 16
_WORDS_OF_GROUP = 5
_TEXT = re.compile(rb"[\x20-\x7e]{6,40}")
_MOSTLY = 0.9


@dataclass(frozen=True)
class Hints:
    """The kind of contents of a block, and what it points to most."""

    content: str
    """``module``, ``symbol``, ``slab``, ``ftrace`` (its records), ``text``, ``data``,
    ``zeros``, ``not in the dump`` or ``not looked into``."""

    owner: str | None = None
    """Name of the module, symbol or slab cache; ``None`` if there is none, or blocks
    that are alone of their kind have many."""


_RANKS = ("module", "symbol", "slab")
"""More specific kinds come first; almost any page has a pointer or two into slabs."""


class Contents:
    """Looks into the first page of blocks."""

    def __init__(self, context: ScanContext) -> None:
        self._reader = context.reader
        self._page_size = context.page_size
        self._pointers = _Pointers(context)
        self._ftrace = ftrace_pages(context.reader, context.losses)
        self._words: list[dict[int, int]] = []
        self._texts: dict[int, str] = {}
        """By block, of those that are all text."""

    def look_into(self, pfns: Numbers) -> tuple[list[Hints], Numbers]:
        """Read the page at each pfn.

        :return: The different hints, and for each page the number of its hint there.
        """
        hints: list[Hints] = []
        for first in range(0, len(pfns), _AT_ONCE):
            hints += self._look_into_some(pfns[first : first + _AT_ONCE].tolist())
        # Single blocks with a pointer to this and that are no group each.
        frequent = Counter(hints)
        hints = [
            one if one.content == "module" or frequent[one] > 1 else Hints(one.content)
            for one in hints
        ]
        kinds = list(dict.fromkeys(hints))
        numbers = {one: number for number, one in enumerate(kinds)}
        return kinds, np.array([numbers[one] for one in hints], np.int64)

    def words(self, blocks: Iterable[int]) -> tuple[PageWord, ...]:
        """Return the most frequent words of some blocks, by their place in *pfns*."""
        counts: Counter[PageWord] = Counter()
        for block in blocks:
            for number, count in self._words[block].items():
                counts[self._pointers.known[number]] += count
            if block in self._texts:
                counts[PageWord("text", self._texts[block], None, 0)] += 1
        ranked = sorted(
            counts.items(), key=lambda item: (-item[1], item[0].kind, item[0].name)
        )
        return tuple(
            PageWord(word.kind, word.name, word.owner, count)
            for word, count in ranked[:_WORDS_OF_GROUP]
        )

    def _look_into_some(self, pfns: list[int]) -> list[Hints]:
        size = self._page_size
        data = bytearray()
        readable = []
        for pfn in pfns:
            try:
                data += self._reader.read(pfn * size, size, physical=True)
                readable.append(True)
            except drgn.FaultError:
                data += bytes(size)
                readable.append(False)
        pages = np.frombuffer(data, "<u8").reshape(len(pfns), -1)
        found = self._pointers.count(pages)
        hints = []
        for row, pfn in enumerate(pfns):
            self._words.append(found[row])
            if not readable[row]:
                hints.append(Hints("not in the dump"))
            elif pfn in self._ftrace:
                hints.append(Hints("ftrace"))
            else:
                hints.append(self._tell(bytes(data[row * size : (row + 1) * size])))
        return hints

    def _tell(self, page: bytes) -> Hints:
        place = len(self._words) - 1
        counts: dict[tuple[int, str], int] = defaultdict(int)
        for number, count in self._words[place].items():
            word = self._pointers.known[number]
            if word.owner is not None:
                counts[_RANKS.index(word.kind), word.owner] += count
        if counts:
            rank, owner = min(counts, key=lambda key: (key[0], -counts[key], key[1]))
            return Hints(_RANKS[rank], owner)
        some = page.replace(b"\0", b"")
        if not some:
            return Hints("zeros")
        texts = _TEXT.findall(page)
        if sum(map(len, texts)) >= _MOSTLY * len(some):
            self._texts[place] = texts[0].decode("ascii")
            return Hints("text")
        return Hints("data")


class _Pointers:
    """Finds the symbol, module or slab cache of kernel addresses, each once."""

    def __init__(self, context: ScanContext) -> None:
        reader, losses = context.reader, context.losses
        prog = reader.prog
        self._end_pfn = max(
            (part.pfn + part.pages for part in context.ranges), default=0
        )
        self._page_size = context.page_size
        self._symbols = SymbolNames(reader, losses)
        self.known: list[PageWord] = []
        self._numbers: dict[PageWord, int] = {}
        self._by_address: dict[int, int | None] = {}
        self._by_pfn: dict[int, int | None] = {}
        self._start: int | None = None
        self._kernel_start = np.uint64(context.layout.kernel_start)
        self._slabs: SlabNames | None = None
        try:
            self._start = pfn_to_virt(prog, 0).value_()
            self._slabs = SlabNames(reader, context.layout)
        except (LookupError, drgn.FaultError) as error:
            losses.lose(Loss.SLAB_CACHES, f"pointers into slabs tell nothing: {error}")

    def count(self, pages: npt.NDArray[np.uint64]) -> list[dict[int, int]]:
        """Count, for each page, the words that its pointers are.

        :return: Counts by number in ``known``, the most frequent of each page only.
        """
        rows, columns = np.nonzero((pages >= self._kernel_start) & (pages < _LAST))
        values, index = np.unique(pages[rows, columns], return_inverse=True)
        numbers = self._tell(values)[index]
        known = numbers >= 0
        pairs = np.stack((rows[known], numbers[known]))
        pairs, counts = np.unique(pairs, axis=1, return_counts=True)
        found: list[Counter[int]] = [Counter() for _ in range(len(pages))]
        for row, number, count in zip(*pairs.tolist(), counts.tolist(), strict=True):
            found[row][number] = count
        return [dict(counts.most_common(_WORDS_OF_BLOCK)) for counts in found]

    def _tell(self, addresses: Addresses) -> Numbers:
        """Return the number of the word of each address, -1 if there is none."""
        numbers = np.full(len(addresses), -1, np.int64)
        self._tell_slabs(addresses, numbers)
        for place in np.flatnonzero(self._symbols.may_name(addresses)).tolist():
            number = self._by_symbol(int(addresses[place]))
            if number is not None:
                numbers[place] = number
        return numbers

    def _tell_slabs(self, addresses: Addresses, numbers: Numbers) -> None:
        if self._slabs is None or self._start is None:
            return
        pfns = page_numbers(addresses, self._start, self._page_size, self._end_pfn)
        inside = pfns < np.uint64(self._end_pfn)
        wanted, index = np.unique(pfns[inside], return_inverse=True)
        if len(self._by_pfn) > _MAX_PFNS:
            self._by_pfn.clear()
        new = [pfn for pfn in wanted.tolist() if pfn not in self._by_pfn]
        names = self._slabs.of(np.array(new, np.uint64)) if new else []
        for pfn, name in zip(new, names, strict=True):
            word = None if name is None else PageWord("slab", name, name, 0)
            self._by_pfn[pfn] = self._number(word)
        found = [self._by_pfn[pfn] for pfn in wanted.tolist()]
        each = np.array([-1 if one is None else one for one in found], np.int64)
        numbers[inside] = each[index]

    def _by_symbol(self, address: int) -> int | None:
        if address not in self._by_address:
            if len(self._by_address) >= _MAX_WORDS:
                return None
            found = self._symbols.name(address)
            word = None
            if found is not None and found.module is not None:
                word = PageWord("module", found.name, found.module, 0)
            elif found is not None:
                word = PageWord("symbol", found.name, found.symbol, 0)
            self._by_address[address] = self._number(word)
        return self._by_address[address]

    def _number(self, word: PageWord | None) -> int | None:
        if word is None:
            return None
        if word not in self._numbers:
            self._numbers[word] = len(self.known)
            self.known.append(word)
        return self._numbers[word]


_POINTER = struct.Struct("<Q")
_MAX_GROUPS = 1 << 16
"""Some for each module."""

_ALIKE = "some records of ftrace look like others'"


def ftrace_pages(reader: Reader, losses: LossLog) -> frozenset[int]:
    """Find the first page of each block of records; none where nothing tells."""
    prog = reader.prog
    found: set[int] = set()
    seen: set[int] = set()
    try:
        group = find_variable(prog, "ftrace_pages_start").value_()
    except LookupError:
        return frozenset()  # CONFIG_DYNAMIC_FTRACE=n
    except drgn.FaultError as error:
        # A page of zeros is left out of most dumps, and is no loss.
        losses.note("lost", f"{_ALIKE}: {error}", "ftrace")
        return frozenset()
    try:
        type_ = prog.type("struct ftrace_page")
        following, records = (
            drgn.offsetof(type_, name) for name in ("next", "records")
        )
        size = drgn.sizeof(type_)
        start = pfn_to_virt(prog, 0).value_()
        shift = prog["PAGE_SHIFT"].value_()
        while group:
            if group in seen or len(seen) >= _MAX_GROUPS:
                raise drgn.FaultError("their list is a loop", group)
            seen.add(group)
            data = reader.read(group, size)
            (address,) = _POINTER.unpack_from(data, records)
            found.add(address - start >> shift)
            (group,) = _POINTER.unpack_from(data, following)
    except (LookupError, drgn.FaultError) as error:
        losses.lose(Loss.FTRACE, f"{_ALIKE}: {error}")
    return frozenset(found)
