# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Finds pages that hold data of pipes (fs/pipe.c) and sockets (net/core/skbuff.c).

No kernel counter includes them. Socket buffers from the slab allocator are in the slab
classes already; these are their page fragments.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.files import OpenFiles, processes
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader, column, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.walks import list_records, tree_records
from msatools.kernel.words import unsigned
from msatools.selfdesc.find import find_type, find_variable, member_of, offset_of

_MAX_RING = 1 << 20


def pipe_pages(reader: Reader, files: OpenFiles, losses: LossLog) -> Addresses:
    """
    Return the addresses of the struct pages in all open pipes.

    Those that were spliced into a pipe belong to a file as long as it has them: that it
    was truncated since is why the pipe alone may have them.
    """
    prog = reader.prog
    pipe = find_type(prog, "struct pipe_inode_info")
    buffer = find_type(prog, "struct pipe_buffer")
    page, ops = (member_of(buffer, name).offset // 8 for name in ("page", "ops"))
    # Anonymous pipes have their own file operations since v6.15.
    pipes = files.private_data(("pipeanon_fops", "pipefifo_fops"))
    records, readable = reader.read_records(pipes, drgn.sizeof(pipe))
    parts = _spare_pages(pipe, records)
    rings = column(records, member_of(pipe, "ring_size").offset, 4)
    bufs = column(records, member_of(pipe, "bufs").offset)
    # ring_size is a power of two: the kernel masks indices with it.
    possible = (rings & (rings - np.uint64(1))) == 0
    possible &= readable & (bufs != 0) & (rings != 0) & (rings <= _MAX_RING)
    losses.lose(Loss.PIPES, count=int(np.count_nonzero(~possible)))
    for address, ring in zip(
        bufs[possible].tolist(), rings[possible].tolist(), strict=True
    ):
        try:
            words = reader.words(address, ring * (drgn.sizeof(buffer) // 8))
        except UNREADABLE:
            losses.lose(Loss.PIPES)
            continue
        words = words.reshape(ring, drgn.sizeof(buffer) // 8)
        # A consumed buffer keeps its page pointer but not its ops.
        parts.append(words[words[:, ops] != 0, page])
    pages = np.concatenate(parts)
    used: Addresses = pages[pages != 0]
    return used


def _spare_pages(pipe: drgn.Type, records: npt.NDArray[np.uint8]) -> list[Addresses]:
    """Return the pages that pipes keep for the next write."""
    if not pipe.has_member("prealloc"):
        # An array of two since v6.15, a single page before.
        spare = member_of(pipe, "tmp_page")
        offsets = range(spare.offset, spare.offset + drgn.sizeof(spare.type), 8)
        return [column(records, offset) for offset in offsets]
    # A stack since v7.3; entries above its count are stale.
    stack = member_of(pipe, "prealloc")
    pages, count = (member_of(stack.type, name) for name in ("pages", "count"))
    counts = column(records, stack.offset + count.offset, drgn.sizeof(count.type))
    return [
        column(records, stack.offset + pages.offset + 8 * number)[counts > number]
        for number in range(drgn.sizeof(pages.type) // 8)
    ]


_QUEUES = ("sk_receive_queue", "sk_write_queue", "sk_error_queue")


def socket_pages(reader: Reader, files: OpenFiles, losses: LossLog) -> Addresses:
    """
    Return the addresses of the struct pages of all open sockets' fragments.

    These are the fragments of queued buffers, and the page_frag of each socket and
    process.

    :raises MissingError: if the kernel has no sockets or its types lack them
    """
    skbs = _Skbs(reader, losses)
    sockets = files.private_data(("socket_file_ops",))
    sk = member_of(find_type(reader.prog, "struct socket"), "sk").offset
    records, readable = reader.read_records(sockets, sk + 8)
    losses.lose(Loss.SOCKETS, count=int(np.count_nonzero(~readable)))
    socks = distinct(column(records, sk))
    skbs.add_queues(socks[socks != 0])
    # Those of threads other than the leader are not included.
    kept = processes(reader, losses).frag_pages
    pages = np.concatenate((np.array(skbs.pages, np.uint64), kept))
    return distinct(pages[pages != 0])


class _SkbLayout(Struct, frozen=True):
    """Offsets in a ``struct sk_buff``, and in its ``struct skb_shared_info``."""

    bytes: int
    """Bytes of the former to read."""

    end: int
    head: int
    shared_bytes: int
    nr_frags: int
    frag_list: int
    frags: int
    frag_words: int


def _skb_layout(prog: drgn.Program) -> _SkbLayout:
    skb = find_type(prog, "struct sk_buff")
    end, head = (member_of(skb, name).offset for name in ("end", "head"))
    shared = find_type(prog, "struct skb_shared_info")
    frags = member_of(shared, "frags")
    return _SkbLayout(
        bytes=max(end, head) + 8,
        end=end,
        head=head,
        shared_bytes=drgn.sizeof(shared),
        nr_frags=member_of(shared, "nr_frags").offset,
        frag_list=member_of(shared, "frag_list").offset,
        frags=frags.offset,
        # The first member of a fragment is the page: bv_page, since v6.9 netmem.
        frag_words=drgn.sizeof(frags.type.type) // 8,
    )


class _Skbs:
    """Collects the page fragments of socket buffers."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        prog = reader.prog
        self.pages: list[int] = []
        self._reader = reader
        self._losses = losses
        sock = find_type(prog, "struct sock")
        self._prot = offset_of(sock, "__sk_common.skc_prot")
        self._tcp = _addresses(prog, ("tcp_prot", "tcpv6_prot"))
        self._queues = [member_of(sock, name).offset for name in _QUEUES]
        self._rtx = member_of(sock, "tcp_rtx_queue").offset
        self._frag = offset_of(sock, "sk_frag.page")
        self._sock_size = max(*self._queues, self._rtx, self._prot, self._frag) + 16

    @cached_property
    def _skb(self) -> "_SkbLayout":
        return _skb_layout(self._reader.prog)

    def add_queues(self, socks: Addresses) -> None:
        records, readable = self._reader.read_records(socks, self._sock_size)
        unreadable = int(np.count_nonzero(~readable))
        self._losses.lose(Loss.SOCKETS, count=unreadable)
        self.pages += column(records, self._frag).tolist()
        for offset in self._queues:
            firsts = column(records, offset)
            heads = socks + np.uint64(offset)
            for head in heads[(firsts != heads) & (firsts != 0)].tolist():
                self._add_all(self._list(head))
        tcp = np.isin(column(records, self._prot), self._tcp)
        if not tcp.any():
            return
        tcp_sock = find_type(self._reader.prog, "struct tcp_sock")
        unordered = member_of(tcp_sock, "out_of_order_queue").offset
        # The retransmit queue and the out-of-order queue; most are empty.
        for offset in (self._rtx, unordered):
            roots = socks[tcp] + np.uint64(offset)
            firsts, known = self._reader.words_near(roots)
            for root in roots[(firsts != 0) | ~known].tolist():
                self._add_all(self._tree(root))

    def _list(self, head: int) -> Iterator[bytes]:
        for _, data in list_records(
            self._reader, head, 0, self._skb.bytes, self._losses, "a socket's queue"
        ):
            yield data

    def _tree(self, root: int) -> Iterator[bytes]:
        for _, data in tree_records(
            self._reader, root, 0, self._skb.bytes, self._losses, "a socket's queue"
        ):
            yield data

    def _add_all(self, skbs: Iterator[bytes]) -> None:
        for skb in skbs:
            try:
                self._add(skb)
            except UNREADABLE:
                self._losses.lose(Loss.SOCKET_BUFFERS)

    def _add(self, skb: bytes) -> None:
        """Add a buffer's fragments, and those of the buffers on its frag_list."""
        layout = self._skb
        todo, seen = [skb], set[int]()
        while todo:
            skb = todo.pop()
            head = unsigned(skb, layout.head, 8)
            end = unsigned(skb, layout.end, 4)
            shared = self._reader.read(head + end, layout.shared_bytes)
            count = shared[layout.nr_frags]
            words = np.frombuffer(shared, np.uint64, offset=layout.frags)
            pages = words[:: layout.frag_words][:count]
            # Bit 0 marks device memory (net_iov), which has no struct page.
            self.pages += pages[pages & np.uint64(1) == 0].tolist()
            chained = unsigned(shared, layout.frag_list, 8)
            while chained and chained not in seen:
                seen.add(chained)
                todo.append(self._reader.read(chained, layout.bytes))
                chained = unsigned(todo[-1], 0, 8)  # skb->next


def _addresses(prog: drgn.Program, names: Iterable[str]) -> list[int]:
    """Return the addresses of the variables that this kernel has."""
    addresses = []
    for name in names:
        with suppress(MissingError):
            addresses.append(int(find_variable(prog, name).address_))
    return addresses
