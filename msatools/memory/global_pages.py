# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the pages that variables of the kernel point to.

These are single pages, such as those of VMCOREINFO, and hash tables that were allocated
at boot (mm/mm_init.c, alloc_large_system_hash()). A table takes whole pages and not a
whole block: alloc_pages_exact() frees the pages behind it. Tables that are larger than
the largest block, or spread over nodes, are areas of vmalloc; tables allocated before
the page allocator was set up are reserved memory.
"""

from collections.abc import Iterator
from contextlib import suppress

import drgn
import numpy as np

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.code import kernel_symbol
from msatools.kernel.reader import Reader, is_left_out, unsigned
from msatools.kernel.report import Loss, LossLog
from msatools.memory.owned_pages import NO_PFNS, Pfns, direct_pfns
from msatools.program.linear import KERNEL_HALF
from msatools.selfdesc.find import find_type, find_variable, member_of

_MAX_TABLE = 1 << 30
"""Upper bound of a table's bytes; the page allocator has no block as large."""

_TABLES = (
    ("mount_hashtable", "m_hash_mask", "struct hlist_head"),
    ("mountpoint_hashtable", "mp_hash_mask", "struct hlist_head"),
    ("ip_idents", "ip_idents_mask", "unsigned int"),
    ("ip_tstamps", "ip_idents_mask", "unsigned int"),
    ("token_hash", "token_mask", "struct token_bucket"),
)
"""Pointers to tables, the masks of their indices, and the types of entries: of
fs/namespace.c, net/ipv4/route.c and net/mptcp/token.c."""

_OF_STRUCTS = (
    ("tcp_hashinfo", "struct inet_hashinfo", "ehash", "ehash_mask", 1),
    ("tcp_hashinfo", "struct inet_hashinfo", "bhash", "bhash_size", 0),
    # "net: Add a bhash2 table hashed by port and address" (in v6.1)
    ("tcp_hashinfo", "struct inet_hashinfo", "bhash2", "bhash_size", 0),
    ("tcp_hashinfo", "struct inet_hashinfo", "lhash2", "lhash2_mask", 1),
    ("udp_table", "struct udp_table", "hash", "mask", 1),
    ("udp_table", "struct udp_table", "hash2", "mask", 1),
    # "net/udp: Add 4-tuple hash list basis" (in v6.13)
    ("udp_table", "struct udp_table", "hash4", "mask", 1),
    ("udplite_table", "struct udp_table", "hash", "mask", 1),
    ("udplite_table", "struct udp_table", "hash2", "mask", 1),
)
"""Structures with pointers to tables: variable, type, member that points to the table,
member with the number of entries or their mask, and the number to add to the latter."""

_LOGGED = (("table_perturb", b"Table-perturb"),)
"""Pointers to tables whose size is a constant of the kernel's configuration, not a
variable, and the names of the tables in the kernel log."""

_LOG_LINE = b" hash table entries: "
"""Text between a table's name and "512 (order: 0, 4096 bytes, linear)" in the log
(mm/mm_init.c)."""

_LOG_SIZE = b" bytes, linear)"
_LOG_ENTRY = 64
"""Upper bound of the bytes from the number of entries to :data:`_LOG_SIZE`."""

_MAX_LOG = 64 << 20

_SINGLE = (
    # kernel/vmcore_info.c, kernel/power/swap.c, drivers/ras/cec.c
    *("vmcoreinfo_note", "vmcoreinfo_data", "swsusp_header", "ce_arr"),
    # lib/vdso/datastore.c, since v6.15; fs/quota/dquot.c
    *("vdso_k_time_data", "vdso_k_rng_data", "dquot_hash"),
)
"""Pointers to a single page."""

_ZERO_BYTES = 64 << 10
"""Bytes of fs/iomap/direct-io.c's ``zero_page`` (IOMAP_ZERO_PAGE_SIZE)."""


def global_pages(reader: Reader, memmap: int, size: int, losses: LossLog) -> Pfns:
    """Return the pfns of all pages that these variables point to.

    :param memmap: Address of the struct page of pfn 0.
    :param size: Bytes of a ``struct page``.
    """
    page = int(find_variable(reader.prog, "PAGE_SIZE").value_())
    parts = [NO_PFNS]
    left = reader.most(page)
    for find in (_tables, _of_structs, _futexes, _timers, _logged, _single):
        try:
            for address, count in find(reader):
                pages = -(-count // page)
                if not 0 < count <= _MAX_TABLE or pages > left:
                    losses.lose(Loss.GLOBALS, f"a table cannot have {count:,} bytes")
                    continue
                pfns = direct_pfns(reader.prog, [address])
                left -= pages * len(pfns)
                parts += [pfn + np.arange(pages, dtype=np.uint64) for pfn in pfns]
        except MissingError:
            continue  # the kernel has no such table
        except UNREADABLE as error:
            # Most dumps leave out pages of zeros.
            if not is_left_out(error):
                losses.lose(Loss.GLOBALS, f"cannot read variables: {error}")
    with suppress(MissingError, *UNREADABLE):
        # These pages are no compound page. They are replaced by a folio of zeros since
        # "iomap: use largest_zero_folio() in iomap_dio_zero()" (in v6.18).
        pointer = _word(reader, kernel_symbol(reader.prog, "zero_page"))
        first, rest = divmod(pointer - memmap, size)
        if pointer > memmap and not rest:
            parts.append(first + np.arange(_ZERO_BYTES // page, dtype=np.uint64))
    return np.concatenate(parts)


_Found = Iterator[tuple[int, int]]
"""Yields the address and the bytes of each table."""


def _tables(reader: Reader) -> _Found:
    prog = reader.prog
    for pointer, mask, type_name in _TABLES:
        with suppress(MissingError):
            size = drgn.sizeof(find_type(prog, type_name))
            address = _word(reader, kernel_symbol(prog, pointer))
            yield address, size * (_number(reader, kernel_symbol(prog, mask)) + 1)


def _of_structs(reader: Reader) -> _Found:
    prog = reader.prog
    for variable, type_name, pointer, count, more in _OF_STRUCTS:
        with suppress(MissingError):
            address = kernel_symbol(prog, variable)
            type_ = find_type(prog, type_name)
            member = member_of(type_, pointer)
            size = drgn.sizeof(member.type.type)
            number = _number(reader, address + member_of(type_, count).offset)
            yield _word(reader, address + member.offset), size * (number + more)


def _futexes(reader: Reader) -> _Found:
    """Yield the tables of waiters on futexes (kernel/futex/core.c).

    They are not found on kernels that keep their address only in code: "futex: Use
    runtime constants for __futex_hash() hot path" (after v7.1).
    """
    prog = reader.prog
    data = kernel_symbol(prog, "__futex_data")
    size = drgn.sizeof(find_type(prog, "struct futex_hash_bucket"))
    first, second = reader.words(data, 2).tolist()
    # The structure has no name and is slow to look up. It is {queues, hashsize}, or,
    # since "futex: Implement FUTEX2_NUMA" (in v6.16), {mask, shift, queues[]} with a
    # table for each node.
    if first >= KERNEL_HALF:
        yield first, size * second
        return
    nodes = int(find_variable(prog, "nr_node_ids").value_())
    for address in reader.words(data + 16, min(max(nodes, 1), 1024)).tolist():
        if address:
            yield address, size * (first + 1)


def _timers(reader: Reader) -> _Found:
    """Yield the table of POSIX timers (kernel/time/posix-timers.c).

    ``__timer_data`` is ``{buckets, mask, ...}`` since "posix-timers: Improve hash table
    performance" (in v6.15); before, the table was static.
    """
    size = drgn.sizeof(find_type(reader.prog, "struct timer_hash_bucket"))
    data = kernel_symbol(reader.prog, "__timer_data")
    yield _word(reader, data), size * (_word(reader, data + 8) + 1)


def _logged(reader: Reader) -> _Found:
    """Yield the tables whose size is in the kernel log, unless it was overwritten."""
    prog = reader.prog
    pointers = {}
    for name, title in _LOGGED:
        with suppress(MissingError):
            pointers[title] = kernel_symbol(prog, name)
    if not pointers:
        return
    length = _number(reader, kernel_symbol(prog, "log_buf_len"))
    start = _word(reader, kernel_symbol(prog, "log_buf"))
    log = reader.read(start, min(length, _MAX_LOG))
    for title, pointer in pointers.items():
        # No regular expression: compiling it would take longer than the search.
        _, found, rest = log.partition(title + _LOG_LINE)
        entry, is_linear, _ = rest[:_LOG_ENTRY].partition(_LOG_SIZE)
        digits = entry.rpartition(b" ")[2]
        if found and is_linear and digits.isdigit():
            address, size = _word(reader, pointer), int(digits)
            # Programs may write the same text to the log. A real table is aligned to
            # its size.
            if size & size - 1 == 0 and address % max(size, 1) == 0:
                yield address, size


def _single(reader: Reader) -> _Found:
    for name in _SINGLE:
        with suppress(MissingError):
            yield _word(reader, kernel_symbol(reader.prog, name)), 1


def _word(reader: Reader, address: int) -> int:
    return unsigned(reader.read_near(address, 8), 0, 8)


def _number(reader: Reader, address: int) -> int:
    """Read an unsigned int."""
    return unsigned(reader.read_near(address, 4), 0, 4)
