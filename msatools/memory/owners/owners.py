# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the owners of pages whose struct page does not record an owner."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from msatools.errors import LOST, MissingError
from msatools.kernel.files import OpenFiles
from msatools.kernel.losses import Loss
from msatools.kernel.pagetables import PageTables, pmd_order
from msatools.kernel.reader import Addresses, Reader, first_of_each
from msatools.kernel.report import LossLog
from msatools.kernel.vmemmap import vmemmap_base
from msatools.memory.owners.blocklayer import request_pages
from msatools.memory.owners.dma import dma_pages
from msatools.memory.owners.dmabufs import dma_bufs
from msatools.memory.owners.globals import global_pages
from msatools.memory.owners.ipc import pipe_pages, socket_pages
from msatools.memory.owners.mempools import mempool_pages
from msatools.memory.owners.percpu import PercpuPages, percpu_pages
from msatools.memory.owners.plugged import self_hosted_pages
from msatools.memory.owners.rings import ring_pages
from msatools.memory.owners.stacks import direct_stacks, has_vmapped_stacks
from msatools.memory.owners.tracing import tracing_pages
from msatools.memory.owners.vmalloc import (
    NO_AREAS,
    VmallocAreas,
    cached_stacks,
    freed_stacks,
    kernel_stacks,
    vmalloc_areas,
)
from msatools.memory.pages.classes import PageClass
from msatools.memory.pages.layout import PageLayout
from msatools.memory.pages.memmap import MemmapRange
from msatools.selfdesc.find import drgn_lookups, find_variable
from msatools.tasks.spaces import address_spaces

Pfns = npt.NDArray[np.uint64]

_PFN_BITS = 52
"""Bits of a pfn in the word that is sorted: more than any physical address needs."""

_CLAIM_BITS = 64 - _PFN_BITS
_CODE_BITS = 8


class OwnedPages(Struct, frozen=True):
    """Pages claimed by other structures, ascending and unique by pfn."""

    pfns: npt.NDArray[np.uint64]
    codes: npt.NDArray[np.uint8]


class Owners(Struct):
    """Pages claimed by their owners, and numbers that the checks need."""

    owned: list[tuple[int, Pfns]] = field(default_factory=list)
    """Class code and pages of each claim; the first claim to a page wins."""

    areas: VmallocAreas = NO_AREAS
    stack_pages: int = 0
    """Pages of each kernel stack; 0 without vmapped stacks."""

    cached_stacks: int = 0
    """Number of stacks of exited tasks that CPUs cache for the next fork."""

    freed_stacks: Callable[[], int] = lambda: 0
    """Counts the stacks of exited tasks that are freed after an RCU grace period: to
    look for them takes a read of each stack."""

    direct_stacks: bool = False
    """Whether kernel stacks are not areas of vmalloc."""

    percpu: PercpuPages = field(default_factory=lambda: PercpuPages([], 0, 0))
    _files: OpenFiles | None = None

    def files(self, reader: Reader, losses: LossLog) -> OpenFiles:
        """Return the open files; they are collected only once."""
        if self._files is None:
            self._files = OpenFiles(reader, losses)
        return self._files

    def claim(self, code: int, pfns: Pfns) -> None:
        """Claim pages for a class; impossible pfns of a damaged dump are dropped."""
        assert len(self.owned) < 1 << _CLAIM_BITS - _CODE_BITS
        self.owned.append((code, pfns[pfns < np.uint64(1 << _PFN_BITS)]))

    def pages(self) -> OwnedPages:
        """Return all claimed pages with the class of the first claim to each."""
        words = [np.empty(0, np.uint64)]
        for number, (code, pfns) in enumerate(self.owned):
            # Pfn, claim and code in one word: sorting takes half the time.
            claim = np.uint64(number << _CODE_BITS | code)
            words.append(pfns << np.uint64(_CLAIM_BITS) | claim)
        claims = np.sort(np.concatenate(words), kind="stable")
        pfns = claims >> np.uint64(_CLAIM_BITS)
        first = first_of_each(pfns)
        return OwnedPages(pfns[first], claims[first].astype(np.uint8))


class OwnerSearch:
    """Finds the owners of single pages; collects no more owners than that takes."""

    def __init__(
        self,
        reader: Reader,
        layout: PageLayout,
        ranges: list[MemmapRange],
        losses: LossLog,
    ) -> None:
        self.owners = Owners()
        """The owners collected so far."""

        self._claims = _claims(self.owners, reader, layout, ranges, losses)

    def find(self, pfns: Sequence[int]) -> int | None:
        """Return the class that an owner gives a page; ``None`` if none claims it.

        :param pfns: The page, and the head of its compound page.
        """
        wanted = np.array(pfns, np.uint64)
        looked = 0
        while True:
            for code, owned in self.owners.owned[looked:]:
                if np.isin(wanted, owned).any():
                    return code
            looked = len(self.owners.owned)
            if next(self._claims, _NO_MORE) is _NO_MORE:
                return None


_NO_MORE = object()


def collect_owners(
    reader: Reader,
    layout: PageLayout,
    ranges: list[MemmapRange],
    losses: LossLog,
) -> Owners:
    """Collect the pages of all owners; note each owner that cannot be read."""
    owners = Owners()
    for _ in _claims(owners, reader, layout, ranges, losses):
        pass
    return owners


def _claims(
    owners: Owners,
    reader: Reader,
    layout: PageLayout,
    ranges: list[MemmapRange],
    losses: LossLog,
) -> Iterator[None]:
    """Add the pages of one kind of owner after the other."""
    for claim in (
        _claim_vmalloc,
        _claim_direct_stacks,
        _claim_percpu,
        _claim_page_tables,
        _claim_pipes,
        _claim_sockets,
        _claim_huge_zero,
        _claim_rings,
        _claim_requests,
        _claim_mempools,
        _claim_tracing,
        _claim_dma,
        _claim_globals,
        _claim_dma_bufs,
        _claim_vmap,
    ):
        try:
            with drgn_lookups:
                claim(owners, reader, layout, losses)
        except LOST as error:
            what = claim.__name__.removeprefix("_claim_").replace("_", " ")
            text = f"{what}: cannot be attributed: {error}"
            losses.lose(Loss.OWNERS, text, about=what)
        yield
    try:
        _claim_memmap(owners, reader, layout, ranges, losses)
    except LOST as error:
        losses.lose(Loss.OWNERS, f"memmap: cannot be attributed: {error}")
    yield


def _claim_memmap(
    owners: Owners,
    reader: Reader,
    layout: PageLayout,
    ranges: list[MemmapRange],
    losses: LossLog,
) -> None:
    """Claim the memmap of hot-plugged memory; that of boot memory is reserved."""
    plugged = [part for part in ranges if not part.early]
    if not plugged or not PageTables.supported(reader.prog):
        return
    # As the memmap of boot memory is: never given to the page allocator.
    owners.claim(PageClass.RESERVED, self_hosted_pages(reader, losses))
    tables = PageTables(reader, losses)
    step = find_variable(reader.prog, "PAGE_SIZE").value_()
    pfns = (
        tables.pfn(address)
        for part in plugged
        for address in range(part.address, part.address_end(layout.size), step)
    )
    mapped = [pfn for pfn in pfns if pfn is not None]
    owners.claim(PageClass.MEMMAP, np.array(mapped, np.uint64))


def _claim_vmalloc(
    owners: Owners, reader: Reader, layout: PageLayout, losses: LossLog
) -> None:
    areas = owners.areas = vmalloc_areas(reader, losses)
    stacks = kernel_stacks(reader, areas)
    owners.stack_pages = int(areas.lengths()[stacks].max(initial=0))
    owners.cached_stacks = cached_stacks(reader.prog, losses)
    owners.freed_stacks = partial(freed_stacks, reader, areas.start[stacks])
    pfns = pfns_of(areas.pages, reader.prog, layout)
    is_stack, mapped = stacks[areas.rows], areas.mapped[areas.rows]
    owners.claim(PageClass.STACKS, pfns[is_stack])
    owners.claim(PageClass.VMALLOC, pfns[~is_stack & ~mapped])


def _claim_direct_stacks(
    owners: Owners, reader: Reader, layout: PageLayout, losses: LossLog
) -> None:
    if not has_vmapped_stacks(reader.prog):
        owners.direct_stacks = True
        owners.claim(PageClass.STACKS, direct_stacks(reader, losses))


def _claim_percpu(
    owners: Owners, reader: Reader, layout: PageLayout, losses: LossLog
) -> None:
    if PageTables.supported(reader.prog):
        owners.percpu = percpu_pages(reader, PageTables(reader, losses), losses)
        owners.claim(PageClass.PERCPU, np.array(owners.percpu.pfns, np.uint64))


def _claim_page_tables(
    owners: Owners, reader: Reader, layout: PageLayout, losses: LossLog
) -> None:
    if not PageTables.supported(reader.prog):
        losses.note(
            "no-page-tables",
            "this architecture's page tables are not read: the kernel's own and "
            "percpu memory are unattributed",
        )
        return
    tables = PageTables(reader, losses)
    own = tables.kernel_tables() | tables.user_top_tables(
        lambda: [space.top for space in address_spaces(reader, losses)]
    )
    owners.claim(PageClass.PAGE_TABLES_OWN, np.fromiter(own, np.uint64, len(own)))


def _claim_pipes(
    owners: Owners, reader: Reader, layout: PageLayout, losses: LossLog
) -> None:
    pages = pipe_pages(reader, owners.files(reader, losses), losses)
    owners.claim(PageClass.PIPES, pfns_of(pages, reader.prog, layout))


def _claim_sockets(
    owners: Owners, reader: Reader, layout: PageLayout, losses: LossLog
) -> None:
    pages = socket_pages(reader, owners.files(reader, losses), losses)
    owners.claim(PageClass.SOCKETS, pfns_of(pages, reader.prog, layout))


def _claim_rings(
    owners: Owners, reader: Reader, layout: PageLayout, losses: LossLog
) -> None:
    files = owners.files(reader, losses)
    owners.claim(PageClass.RINGS, ring_pages(reader, files, losses))


def _claim_requests(
    owners: Owners, reader: Reader, layout: PageLayout, losses: LossLog
) -> None:
    owners.claim(PageClass.REQUESTS, request_pages(reader, layout, losses))


def _claim_mempools(
    owners: Owners, reader: Reader, layout: PageLayout, losses: LossLog
) -> None:
    owners.claim(PageClass.MEMPOOLS, mempool_pages(reader, losses))


def _claim_tracing(
    owners: Owners, reader: Reader, layout: PageLayout, losses: LossLog
) -> None:
    owners.claim(PageClass.TRACING, tracing_pages(reader, losses))


def _claim_dma(
    owners: Owners, reader: Reader, layout: PageLayout, losses: LossLog
) -> None:
    owners.claim(PageClass.DMA, dma_pages(reader, layout, losses))


def _claim_dma_bufs(
    owners: Owners, reader: Reader, layout: PageLayout, losses: LossLog
) -> None:
    buffers = dma_bufs(reader, layout, owners.files(reader, losses), losses)
    own = [buffer.pages for buffer in buffers if buffer.own]
    owners.claim(PageClass.DMABUF, np.concatenate([np.empty(0, np.uint64), *own]))


def _claim_globals(
    owners: Owners, reader: Reader, layout: PageLayout, losses: LossLog
) -> None:
    memmap = vmemmap_base(reader.prog)
    pages = global_pages(reader, memmap, layout.size, losses)
    owners.claim(PageClass.GLOBALS, pages)


def _claim_vmap(
    owners: Owners, reader: Reader, layout: PageLayout, losses: LossLog
) -> None:
    """Claim what areas map and nobody else has."""
    areas = owners.areas
    pages = areas.pages[areas.mapped[areas.rows]]
    owners.claim(PageClass.VMAP, pfns_of(pages, reader.prog, layout))


def _claim_huge_zero(
    owners: Owners, reader: Reader, layout: PageLayout, losses: LossLog
) -> None:
    # A folio since Linux kernel commit 5691753d73a2 ("mm: convert huge_zero_page
    # to huge_zero_folio") (in v6.10).
    for name in ("huge_zero_folio", "huge_zero_page"):
        try:
            page = find_variable(reader.prog, name).value_()
        except MissingError:
            continue
        if page:
            (first,) = pfns_of(np.array([page], np.uint64), reader.prog, layout)
            pages = np.arange(1 << pmd_order(reader.prog), dtype=np.uint64)
            owners.claim(PageClass.HUGE_ZERO, first + pages)
        return


def pfns_of(pages: Addresses, prog: drgn.Program, layout: PageLayout) -> Pfns:
    """Convert addresses of struct pages to pfns."""
    return (pages - np.uint64(vmemmap_base(prog))) // np.uint64(layout.size)
