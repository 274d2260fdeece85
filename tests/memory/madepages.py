# SPDX-License-Identifier: LGPL-2.1-or-later

"""Make struct pages by hand, in the layout of a real kernel."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from drgn import Program, sizeof

from fixtures.demo import DEMOS
from msatools.kernel.reader import Gap
from msatools.memory.classes import PageClass, PageLayout, page_layout
from msatools.memory.classify import Block, FarHead, FarHeads, classify
from msatools.program import TargetSpec, open_target

ADDRESS = 0xFFFFEA0000000000
"""Address of the first struct page."""

NODE_1 = 1 << 54
NOT_MAPPED = 0xFFFFFFFF

Chosen = int | slice | Sequence[int]


def no_far_heads(address: int) -> FarHead:
    raise AssertionError(hex(address))


def type_word(layout: PageLayout, code: int) -> int:
    """Return the ``_mapcount`` (page type) of a page of a class."""
    types = layout.types
    key = int(np.flatnonzero(types.classes == code)[0])
    return key << types.shift | 0xFFFFFFFF & ~(types.mask << types.shift)


@cache
def open_demo(name: str) -> Program:
    return open_target(TargetSpec(path=str(DEMOS[name].core), types="btf")).prog


def demo_layout(name: str) -> PageLayout:
    """Return the layout of struct page in a demo's kernel."""
    return page_layout(open_demo(name))


def struct_page(prog: Program, pfn: int, member: str) -> int:
    """Return the address of a member of a struct page of a dump."""
    page = prog.type("struct page")
    base: int = prog["vmemmap_base"].value_()
    return base + pfn * sizeof(page) + page.member(member).offset


class Pages:
    """Struct pages without type or owner, in use by the kernel."""

    def __init__(self, layout: PageLayout, count: int, flags: int = NODE_1) -> None:
        self.layout = layout
        self.words = np.zeros((count, layout.size // 8), np.uint64)
        self.put(slice(None), "flags", flags)
        self.put(slice(None), "mapcount", NOT_MAPPED)
        self.put(slice(None), "refcount", 1)

    def address(self, page: int) -> int:
        """Return the address of a struct page by its index."""
        return ADDRESS + page * self.layout.size

    def copy(self) -> "Pages":
        other = Pages(self.layout, len(self.words))
        other.words[:] = self.words
        return other

    def put(self, pages: Chosen, member: str, value: int) -> None:
        """Set a member: 4 bytes if its name ends in ``count``, else 8."""
        self.put_at(
            pages,
            getattr(self.layout, member),
            4 if member.endswith("count") else 8,
            value,
        )

    def put_at(self, pages: Chosen, offset: int, size: int, value: int) -> None:
        new = (value % (1 << 8 * size)).to_bytes(size, "little")
        columns = self.words.view(np.uint8)
        columns[pages, offset : offset + size] = np.frombuffer(new, np.uint8)

    def flag(self, pages: Chosen, *names: str) -> None:
        """Set flags by name, except those that the kernel does not have."""
        for name in names:
            self.flag_bits(pages, self.layout.bits.get(name, 0))

    def flag_bits(self, pages: Chosen, bits: int) -> None:
        self.words[pages, self.layout.flags // 8] |= np.uint64(bits)

    def anon(self, pages: Chosen, mapping: int = 0xFFFF888000000001) -> None:
        self.put(pages, "mapping", mapping)
        self.flag(pages, "swapbacked")

    def free(self, first: int, order: int) -> None:
        """Make one page the first of a free block."""
        word = type_word(self.layout, PageClass.FREE_BUDDY)
        self.put(first, "mapcount", word)
        self.put(first, "private", order)

    def compound(self, first: int, count: int) -> None:
        self.flag(first, "head")
        self.tails(slice(first + 1, first + count), first)

    def tails(self, pages: Chosen, head: int) -> None:
        """Make pages tails of a head, which can be outside of these pages."""
        self.put(pages, "compound_head", self.address(head) | 1)

    def data(self) -> bytes:
        return self.words.tobytes()

    def block(
        self,
        pfn: int = 0,
        far_heads: FarHeads = no_far_heads,
        gaps: list[Gap] | None = None,
        address: int = ADDRESS,
    ) -> Block:
        return classify(self.data(), pfn, address, self.layout, far_heads, gaps)
