# SPDX-License-Identifier: LGPL-2.1-or-later

"""Hints about the users of pages, from the pages' contents and the symbols in them."""

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.code import (
    CodeModules,
    GeneratedCode,
    SortedSymbols,
    kernel_symbol,
    module_area,
)
from msatools.kernel.reader import Addresses, Reader, column
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.slab import read_cache, slab_cache_offset
from msatools.kernel.structs import Numbers
from msatools.memory.by_module import UnloadedModules
from msatools.memory.classes import PageClass, PageLayout
from msatools.memory.model import PageWord
from msatools.memory.owners import ScanContext
from msatools.model import equal_but, hash_but
from msatools.program.linear import page_address, vmemmap_base
from msatools.selfdesc.kallsyms import NoSymbolsError, load_symbols
from msatools.selfdesc.load import finders_of, is_served_by_btf
from msatools.selfdesc.tables import Symbols, SymbolTable

# --- Looks up symbols of addresses in the kernel image and in modules.
#
# Names in the image come from the kernel's own symbols (kallsyms), so that they do not
# depend on the source of the types. These symbols have no sizes: an object is assumed
# to extend to the next symbol, if that is not too far away. Debug info has sizes, and
# addresses after the end of an object have no name. One difference remains: without
# debug info, a pointer to the padding after an object, or to data without a symbol that
# follows it, is named after that object.


_LONGEST = 512 << 10
"""
Maximum distance to the next symbol, in bytes, for a symbol to cover it.

The largest variables that have pointers to them are rcu_state, of 359 KiB, and
printk's. Longer ranges are string constants, which have no symbols, and gaps before a
section.
"""

_ENDS = ("_etext", "_einittext", "_edata")
_END = re.compile(r"__(?:end|stop)_\w+|\w+_end")
"""Linker labels for the end of a section, which cover no addresses after it."""

_SIZED = (drgn.SymbolKind.OBJECT, drgn.SymbolKind.FUNC)


class SymbolName(Struct, frozen=True):
    """The symbol or module that an address belongs to."""

    name: str
    """The symbol, the offset from its start, and the module."""

    symbol: str | None
    """Name of the symbol; ``None`` if the module has no symbol there."""

    module: str | None
    """Name of the module; ``None`` for the kernel image."""

    start: int | None = None
    """Start address of the symbol; ``None`` without a symbol."""

    def __eq__(self, other: object) -> Any:
        return equal_but(self, other, "start")

    def __hash__(self) -> int:
        return hash_but(self, "start")


class SymbolNames:
    """Looks up functions and variables; modules are read when needed."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._image = _bounds(reader.prog, "_stext", "_end")
        self._area = module_area(reader.prog)
        self._modules = CodeModules(reader, losses)
        self._generated = GeneratedCode(reader, losses)
        self._unloaded = UnloadedModules(reader, losses)
        self._of_kernel: _KernelSymbols | None = None

    def may_name(self, addresses: Addresses) -> npt.NDArray[np.bool_]:
        """Return which addresses are in the image, or between first and last module.

        All are False if the kernel does not record these bounds.
        """
        inside = np.zeros(len(addresses), np.bool_)
        for first, end in (self._image, self._area):
            inside |= (addresses >= np.uint64(first)) & (addresses < np.uint64(end))
        return inside

    def name(self, address: int) -> SymbolName | None:
        """Return the name of an address; ``None`` if not found."""
        if self._image[0] <= address < self._image[1]:
            if self._of_kernel is None:
                self._of_kernel = _KernelSymbols(self._reader.prog, self._image)
            symbol = self._of_kernel.find(address)
            if symbol is None:
                return None
            name = _with_offset(symbol, address)
            return SymbolName(name, symbol.name, None, symbol.address)
        module = self._modules.find(address)
        if module is None:
            return self._generated_at(address) or self._of_unloaded(address)
        symbols = self._modules.symbols(module)(self._reader.prog, None, address, True)
        if not symbols:
            return SymbolName(f"[{module.name}]", None, module.name)
        symbol = symbols[0]
        name = f"{_with_offset(symbol, address)} [{module.name}]"
        return SymbolName(name, symbol.name, module.name, symbol.address)

    def _generated_at(self, address: int) -> SymbolName | None:
        """Return the name of generated code, such as a BPF program; ``module`` is a
        substitute chosen by :class:`GeneratedCode`."""
        found = self._generated.find(address)
        if found is None:
            return None
        name = f"{found.name}+{address - found.start:#x} [{found.module}]"
        return SymbolName(name, found.name, found.module, found.start)

    def _of_unloaded(self, address: int) -> SymbolName | None:
        module = self._unloaded.name(address)
        if module is None:
            return None
        return SymbolName(f"{address:#x} [{module}]", None, module)


class _KernelSymbols:
    """The symbols of the kernel image, and their ends if known."""

    def __init__(self, prog: drgn.Program, image: tuple[int, int]) -> None:
        self._end = image[1]
        self._ends: dict[int, int] = {}
        """Ends of the symbols that have a size in debug info, by start address."""

        finder: Symbols | None = None
        symbols: list[drgn.Symbol] = []
        if is_served_by_btf(prog):
            finder = finders_of(prog).symbols
        else:
            # Section symbols have no name.
            symbols = [symbol for symbol in prog.symbols() if symbol.name]
            for symbol in symbols:
                # Labels have no size.
                if symbol.size or symbol.kind in _SIZED:
                    end = symbol.address + symbol.size
                    self._ends[symbol.address] = max(
                        end, self._ends.get(symbol.address, 0)
                    )
            # Without kallsyms, the symbols of debug info are used.
            with contextlib.suppress(NoSymbolsError):
                finder = load_symbols(prog)
        self._symbols: SymbolTable | SortedSymbols
        if isinstance(finder, SymbolTable):
            # A SymbolTable is sorted; making an object of each symbol takes 0.5 s.
            self._symbols = finder
        else:
            if finder is not None:
                symbols = finder(prog, None, None, False)
            self._symbols = SortedSymbols(symbols, [image])

    def find(self, address: int) -> drgn.Symbol | None:
        """Return the symbol that covers an address; ``None`` if not found."""
        named, following = self._symbols.before(address)
        if not named:
            return None
        start, end = named[0].address, following or self._end
        if end - start > _LONGEST or all(map(_is_end, named)):
            end = start
        end = min(end, self._ends.get(start, end))
        return min(named, key=_rank) if address == start or address < end else None


def _is_end(symbol: drgn.Symbol) -> bool:
    if symbol.name in _ENDS:
        return True
    # ``…_end`` is the end of a section only if it is no function.
    return symbol.kind != drgn.SymbolKind.FUNC and bool(_END.fullmatch(symbol.name))


def _rank(symbol: drgn.Symbol) -> tuple[bool, bool, bool, int, str]:
    """Sort names of objects before labels of the linker, which begin with ``_``."""
    return (
        _is_end(symbol),
        symbol.name.startswith("_"),
        symbol.binding != drgn.SymbolBinding.GLOBAL,
        len(symbol.name),
        symbol.name,
    )


def _with_offset(symbol: drgn.Symbol, address: int) -> str:
    offset = address - symbol.address
    return f"{symbol.name}+{offset:#x}" if offset else str(symbol.name)


def _bounds(prog: drgn.Program, first: str, end: str) -> tuple[int, int]:
    try:
        return kernel_symbol(prog, first), kernel_symbol(prog, end)
    except MissingError:
        return 0, 0


# --- Finds hints about the users of pages in the contents of the pages.
#
# Hints are pointers: into a module, to a function or variable of the kernel, or into a
# slab. A page without pointers may be text.


_AT_ONCE = 256
"""Pages examined at once: 1 MiB."""

_ERR_PTRS = np.uint64(0xFFFF_FFFF_FFFF_F000)
"""Values from here on are ERR_PTR() values, not pointers."""

_MAX_PFNS = 1 << 20
"""Maximum number of pfns whose slab cache is cached."""

_MAX_WORDS = 1 << 16
"""Maximum number of addresses whose symbol is looked up."""

_WORDS_OF_PAGE = 16
_WORDS_OF_GROUP = 5
_TEXT = re.compile(rb"[\x20-\x7e]{6,40}")
_TEXT_SHARE = 0.9


class Hints(Struct, frozen=True):
    """The kind of contents of a page, and the owner of most of its pointers."""

    content: str
    """``module``, ``symbol``, ``slab``, ``text``, ``data``, ``zeros``, ``not in the
    dump`` or ``not looked into``."""

    owner: str | None = None
    """Name of the module, symbol or slab cache; ``None`` without pointers, or for
    pages with a symbol or slab cache that no other page has."""


_ALONE = ("module",)
"""Kinds of contents whose owner stays a group of its own, even of one page."""

_RANKS = ("module", "symbol", "slab")
"""Kinds of pointers, the most specific first: most pages have a few into slabs."""


class PageContents(Struct, frozen=True):
    """The contents of one page."""

    hints: Hints
    words: dict[int, int]
    """Maps the index of a word in ``_Pointers.words`` to its count in the page."""

    text: str | None = None
    """First piece of text of a page that is all text."""


class Contents:
    """Examines the contents of pages."""

    def __init__(self, context: ScanContext) -> None:
        self._reader = context.reader
        self._page_size = context.page_size
        self._pointers = _Pointers(context)

    def look_into(self, pfns: Numbers) -> list[PageContents]:
        """Read and examine the page at each pfn."""
        pages: list[PageContents] = []
        for first in range(0, len(pfns), _AT_ONCE):
            pages += self._look_into_some(pfns[first : first + _AT_ONCE].tolist())
        return pages

    def in_objects(self, pfns: Numbers, size: int) -> tuple[int, Counter[PageWord]]:
        """Count the objects that point to each module, symbol or slab cache.

        :param pfns: First page of each slab.
        :param size: Bytes of an object; only the first page of a larger one is read.
        :return: Number of objects examined, and by word the number that point to it.
        """
        # A damaged cache may have objects smaller than a pointer.
        size = max(min(size, self._page_size) // 8 * 8, 8)
        each = self._page_size // size
        counts: Counter[PageWord] = Counter()
        objects = 0
        for pfn in pfns.tolist():
            try:
                data = self._reader.read(
                    pfn * self._page_size, each * size, physical=True
                )
            except UNREADABLE:
                continue
            objects += each
            rows = np.frombuffer(data, "<u8").reshape(each, -1)
            for numbers in self._pointers.count(rows):
                counts.update(self._pointers.words[number] for number in numbers)
        return objects, counts

    def words(self, pages: Iterable[PageContents]) -> tuple[PageWord, ...]:
        """Return the most frequent words of pages with their counts, largest first."""
        counts: Counter[PageWord] = Counter()
        for page in pages:
            for number, count in page.words.items():
                counts[self._pointers.words[number]] += count
            if page.text is not None:
                counts[PageWord("text", page.text, None, 0)] += 1
        ranked = sorted(
            counts.items(), key=lambda item: (-item[1], item[0].kind, item[0].name)
        )
        return tuple(
            PageWord(word.kind, word.name, word.owner, count)
            for word, count in ranked[:_WORDS_OF_GROUP]
        )

    def _look_into_some(self, pfns: list[int]) -> list[PageContents]:
        size = self._page_size
        data = bytearray()
        readable = []
        for pfn in pfns:
            try:
                data += self._reader.read(pfn * size, size, physical=True)
                readable.append(True)
            except UNREADABLE:
                data += bytes(size)
                readable.append(False)
        pages = np.frombuffer(data, "<u8").reshape(len(pfns), -1)
        words = self._pointers.count(pages)
        contents = []
        for row in range(len(pfns)):
            if not readable[row]:
                contents.append(PageContents(Hints("not in the dump"), words[row]))
            else:
                page = bytes(data[row * size : (row + 1) * size])
                contents.append(self._classify(page, words[row]))
        return contents

    def _classify(self, page: bytes, words: dict[int, int]) -> PageContents:
        counts: dict[tuple[int, str], int] = defaultdict(int)
        for number, count in words.items():
            word = self._pointers.words[number]
            if word.owner is not None:
                counts[_RANKS.index(word.kind), word.owner] += count
        if counts:
            rank, owner = min(counts, key=lambda key: (key[0], -counts[key], key[1]))
            return PageContents(Hints(_RANKS[rank], owner), words)
        nonzero = page.replace(b"\0", b"")
        if not nonzero:
            return PageContents(Hints("zeros"), words)
        texts = _TEXT.findall(page)
        if sum(map(len, texts)) >= _TEXT_SHARE * len(nonzero):
            return PageContents(Hints("text"), words, texts[0].decode("ascii"))
        return PageContents(Hints("data"), words)


def distinct_hints(pages: Iterable[PageContents]) -> tuple[list[Hints], Numbers]:
    """
    Return the different hints of pages, and for each page the index of its hints.

    A symbol or slab cache that only one page has is left out of its hints, so that such
    pages are not a group each.
    """
    hints = [page.hints for page in pages]
    frequent = Counter(hints)
    hints = [
        hint if hint.content in _ALONE or frequent[hint] > 1 else Hints(hint.content)
        for hint in hints
    ]
    kinds = list(dict.fromkeys(hints))
    indices = {hint: index for index, hint in enumerate(kinds)}
    return kinds, np.array([indices[hint] for hint in hints], np.int64)


class _Pointers:
    """Looks up the symbol, module or slab cache of addresses; caches the results."""

    def __init__(self, context: ScanContext) -> None:
        reader, losses = context.reader, context.losses
        prog = reader.prog
        self._end_pfn = max(
            (part.pfn + part.pages for part in context.ranges), default=0
        )
        self._page_size = context.page_size
        self._symbols = SymbolNames(reader, losses)
        self.words: list[PageWord] = []
        self._numbers: dict[PageWord, int] = {}
        self._by_address: dict[int, int | None] = {}
        self._by_pfn: dict[int, int | None] = {}
        self._start: int | None = None
        self._kernel_start = np.uint64(context.layout.kernel_start)
        self._slabs: SlabNames | None = None
        try:
            self._start = page_address(prog, 0)
            self._slabs = SlabNames(reader, context.layout)
        except LOST as error:
            losses.lose(Loss.SLAB_CACHES, f"pointers into slabs are not used: {error}")

    def count(self, pages: npt.NDArray[np.uint64]) -> list[dict[int, int]]:
        """Count the pointers of each page by their word.

        :return: Counts by index in ``words``, only the most frequent of each page.
        """
        rows, columns = np.nonzero((pages >= self._kernel_start) & (pages < _ERR_PTRS))
        values, index = np.unique(pages[rows, columns], return_inverse=True)
        numbers = self._lookup(values)[index]
        known = numbers >= 0
        pairs = np.stack((rows[known], numbers[known]))
        pairs, counts = np.unique(pairs, axis=1, return_counts=True)
        by_page: list[Counter[int]] = [Counter() for _ in range(len(pages))]
        for row, number, count in zip(*pairs.tolist(), counts.tolist(), strict=True):
            by_page[row][number] = count
        return [dict(counts.most_common(_WORDS_OF_PAGE)) for counts in by_page]

    def _lookup(self, addresses: Addresses) -> Numbers:
        """Return the number of the word of each address, -1 if not found."""
        numbers = self._lookup_slabs(addresses)
        for row in np.flatnonzero(self._symbols.may_name(addresses)).tolist():
            number = self._by_symbol(int(addresses[row]))
            if number is not None:
                numbers[row] = number
        return numbers

    def _lookup_slabs(self, addresses: Addresses) -> Numbers:
        numbers = np.full(len(addresses), -1, np.int64)
        if self._slabs is None or self._start is None:
            return numbers
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
        known = (self._by_pfn[pfn] for pfn in wanted.tolist())
        of_pfns = [-1 if number is None else number for number in known]
        numbers[inside] = np.array(of_pfns, np.int64)[index]
        return numbers

    def _by_symbol(self, address: int) -> int | None:
        if address not in self._by_address:
            if len(self._by_address) >= _MAX_WORDS:
                return None
            symbol = self._symbols.name(address)
            word = None
            if symbol is not None and symbol.module is not None:
                word = PageWord("module", symbol.name, symbol.module, 0)
            elif symbol is not None:
                word = PageWord("symbol", symbol.name, symbol.symbol, 0)
            self._by_address[address] = self._number(word)
        return self._by_address[address]

    def _number(self, word: PageWord | None) -> int | None:
        if word is None:
            return None
        if word not in self._numbers:
            self._numbers[word] = len(self.words)
            self.words.append(word)
        return self._numbers[word]


class SlabNames:
    """Looks up slab caches by page; each cache is read once."""

    def __init__(self, reader: Reader, layout: PageLayout) -> None:
        """
        :raises MissingError: if the types lack the offset of a slab's cache pointer
        """
        prog = reader.prog
        self._reader = reader
        self._layout = layout
        self._cache = slab_cache_offset(prog)
        self._memmap = np.uint64(vmemmap_base(prog))
        self._names: dict[int, str | None] = {0: None}

    def of(self, pfns: npt.NDArray[np.uint64]) -> list[str | None]:
        """Return each page's cache name; ``None`` if not a slab or unreadable."""
        layout = self._layout
        addresses = self._memmap + pfns * np.uint64(layout.size)
        records, readable = self._reader.read_records(addresses, layout.size)
        info = column(records, layout.compound_head)
        is_tail = info & np.uint64(1) != 0
        encoded = addresses & info if layout.compound_mask else info - np.uint64(1)
        heads, index = np.unique(
            np.where(is_tail, encoded, addresses), return_inverse=True
        )
        records, also_readable = self._reader.read_records(heads, layout.size)
        caches = column(records, self._cache)
        caches[~(self._are_slabs(records) & also_readable)] = 0
        names = [self._name_of(cache) for cache in caches.tolist()]
        return [
            names[row] if known else None
            for row, known in zip(index.tolist(), readable.tolist(), strict=True)
        ]

    def _are_slabs(self, records: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        layout, types = self._layout, self._layout.types
        if layout.slab_bit:
            flags = column(records, layout.flags)
            marked: npt.NDArray[np.bool_] = flags & np.uint64(layout.slab_bit) != 0
            return marked
        words = column(records, layout.mapcount, 4).astype(np.uint32)
        typed = (words + np.uint32(1)) > np.uint32(types.lowest)
        keys = words >> np.uint32(types.shift) & np.uint32(types.mask)
        slabs: npt.NDArray[np.bool_] = typed & (types.classes[keys] == PageClass.SLAB)
        return slabs

    def _name_of(self, cache: int) -> str | None:
        if cache not in self._names:
            try:
                name = read_cache(self._reader, cache).name
            except UNREADABLE:
                name = None
            self._names[cache] = name or None
        return self._names[cache]


def page_numbers(
    addresses: Addresses, start: int, page_size: int, end_pfn: int
) -> Addresses:
    """Convert addresses of the direct map to pfns, others to *end_pfn*.

    :param start: Address of pfn 0 in the direct map.
    """
    pfns: Addresses = (addresses - np.uint64(start)) // np.uint64(page_size)
    return np.minimum(pfns, np.uint64(end_pfn))
