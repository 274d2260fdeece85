# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages of the percpu allocator (mm/percpu.c)."""

from collections.abc import Iterator
from contextlib import suppress

import drgn
import numpy as np

from msatools.kernel.pagetables import PageTables
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.kernel.walks import list_records


def percpu_pfns(
    reader: Reader, tables: PageTables, findings: Findings
) -> tuple[list[int], int]:
    """
    Find the pages of all chunks but those of boot memory, which is reserved.

    :return: Their pfns, and how many pages the boot chunks have.
    """
    prog = reader.prog
    units = prog["pcpu_nr_units"].value_()
    offsets = reader.words(prog["pcpu_unit_offsets"].value_(), units).tolist()
    type_ = prog.type("struct pcpu_chunk")
    base_addr, populated, immutable, nr_pages = (
        type_.member(name).offset
        for name in ("base_addr", "populated", "immutable", "nr_pages")
    )
    unit_pages = prog["pcpu_unit_pages"].value_()
    size = populated + 8 * -(-unit_pages // 64)
    pfns: list[int] = []
    for data in _chunks(reader, findings, type_, size):
        if data[immutable]:
            continue
        base = int.from_bytes(data[base_addr : base_addr + 8], "little")
        pages = int.from_bytes(data[nr_pages : nr_pages + 4], "little")
        bits = np.unpackbits(
            np.frombuffer(data, np.uint8, offset=populated), bitorder="little"
        )[:pages]
        for page in np.flatnonzero(bits).tolist():
            for offset in offsets:
                pfns += (
                    pfn
                    for pfn in tables.pfns(base + offset + (page << 12), 1)
                    if pfn is not None
                )
    return pfns, _boot_pages(prog) * units


def _boot_pages(prog: drgn.Program) -> int:
    """
    Count the pages of each CPU's first unit.

    It holds the kernel's static variables, room for those of modules, and at
    its end the first chunk for dynamic ones (pcpu_setup_first_chunk()).
    """
    first = prog["pcpu_first_chunk"]
    end = first.base_addr.value_() + (first.nr_pages.value_() << 12)
    end -= first.end_offset.value_()
    size: int = end - prog["pcpu_base_addr"].value_()
    return size >> 12


def _chunks(
    reader: Reader, findings: Findings, type_: drgn.Type, size: int
) -> Iterator[bytes]:
    """Read the chunk on each list; a chunk is on the list of its free space."""
    prog = reader.prog
    try:
        lists = prog["pcpu_chunk_lists"]
    except LookupError:
        lists = prog["pcpu_slot"]  # its name before v5.14
    count = prog["pcpu_nr_slots"].value_()
    with suppress(LookupError):
        # From v5.9 to v5.13 memory cgroups had chunks and lists of their own.
        count *= prog.constant("PCPU_NR_CHUNK_TYPES").value_()
    for slot in range(count):
        for _, data in list_records(
            reader,
            lists[slot].address_of_().value_(),
            type_.member("list").offset,
            size,
            findings,
            "a list of percpu chunks",
        ):
            yield data
