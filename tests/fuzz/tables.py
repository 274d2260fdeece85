# SPDX-License-Identifier: LGPL-2.1-or-later

"""Damage of what the kernel says of itself: BTF, kallsyms and unwind tables."""

from functools import cache
from random import Random

from tests.fuzz.change import Change, integers
from tests.fuzz.dumps import PAGE, Dump, contents, page_of, program

_AREAS = (
    ("__start_BTF", "__stop_BTF"),
    ("kallsyms_names", "kallsyms_markers"),
    ("kallsyms_markers", "kallsyms_token_table"),
    ("kallsyms_token_table", "kallsyms_token_index"),
    ("kallsyms_token_index", "kallsyms_offsets"),
    ("kallsyms_offsets", "kallsyms_relative_base"),
    ("kallsyms_num_syms", "kallsyms_names"),
    ("__start_orc_unwind_ip", "__stop_orc_unwind_ip"),
    ("__start_orc_unwind", "__stop_orc_unwind"),
    ("__start_orc_header", "__stop_orc_header"),
    ("orc_lookup", "orc_lookup_end"),
)


@cache
def _areas(core: str) -> tuple[range, ...]:
    """Return the tables that a core has, by address."""
    prog = program(core)
    found = []
    for first, last in _AREAS:
        try:
            start, end = prog.symbol(first).address, prog.symbol(last).address
        except LookupError:
            continue
        if start < end:
            found.append(range(start, end))
    return tuple(found)


def change(dump: Dump, chance: Random) -> list[Change]:
    """Return changes to one of the tables."""
    area = chance.choice(_areas(dump.core))
    changes: dict[int, bytes] = {}
    for _ in range(chance.choice((1, 1, 3, 30))):
        # The headers are at the front.
        front = chance.random() < 0.4
        offset = chance.randrange(min(len(area), 64) if front else len(area))
        address = area.start + offset
        try:
            pfn, place = page_of(dump.core, address)
        except LookupError:
            continue
        page = changes.get(pfn) or contents(dump.core)[pfn]
        new = integers(chance)[: PAGE - place]
        changes[pfn] = page[:place] + new + page[place + len(new) :]
    return changed_pages(dump, changes)


def changed_pages(dump: Dump, pages: dict[int, bytes]) -> list[Change]:
    """Return the changes that replace pages of memory."""
    end = len(dump.data)
    changes = []
    for pfn, page in pages.items():
        for offset, data in dump.changed_page(pfn, page, end).items():
            changes.append(Change(offset, data))
        end += PAGE
    return changes
