# SPDX-License-Identifier: LGPL-2.1-or-later

"""Put answers into words: the most specific fact, in one line."""

from collections.abc import Iterator

from msgspec import Struct

from msatools.reports.units import size
from msatools.whatis.model import (
    AddressAnswer,
    AskedAddress,
    Kind,
    Page,
    PageMapper,
    PerCpuPlace,
    SlabPlace,
    StackPlace,
    Symbol,
    TableOwner,
    Task,
    UserPlace,
    VmallocArea,
    poison_text,
)

_NAMED = 3
"""Maximum number of processes or caches named in a line; the others are counted."""


class AddressEnds(Struct, frozen=True):
    """Ends of the ranges of NULL pointers and of user addresses."""

    page_size: int
    user_end: int
    """End of the addresses that processes can have, exclusive."""


_CLASSES = {
    "free.buddy": "a free page",
    "free.pcp": "a free page of a CPU's list",
    "free.hugetlb": "a free page of the hugetlb pool",
    "free.unaccepted": "unaccepted memory",
    "user.anon": "anonymous memory",
    "user.ksm": "anonymous memory, shared by KSM",
    "user.hugetlb": "a hugetlb page",
    "cache.file": "page cache",
    "cache.exec": "page cache of an executed file",
    "cache.shmem": "shared memory",
    "cache.blockdev": "page cache of a block device",
    "kernel.slab": "a slab",
    "kernel.large_kmalloc": "a large kmalloc",
    "kernel.page_tables": "a page table",
    "kernel.page_tables_own": "a page table of the kernel, or at the top of a process",
    "kernel.stacks": "a kernel stack",
    "kernel.vmalloc": "an area of vmalloc",
    "kernel.vmap": "memory of the kernel that is mapped anew (vmap)",
    "kernel.percpu": "per-CPU memory",
    "kernel.pipes": "the buffer of a pipe",
    "kernel.sockets": "the buffer of a socket",
    "kernel.rings": "a ring that a program shares (perf, io_uring, packets)",
    "kernel.requests": "requests of a disk",
    "kernel.dma": "a queue or buffer of a device (DMA)",
    "kernel.dmabuf": "memory of a dma-buf",
    "kernel.mempools": "the reserve of a memory pool",
    "kernel.tracing": "memory of the kernel's tracing",
    "kernel.globals": "a table or page that a variable of the kernel points to",
    "kernel.memmap": "struct pages of hot-plugged memory",
    "kernel.huge_zero": "the huge zero page",
    "kernel.zsmalloc": "compressed memory (zsmalloc)",
    "kernel.movable": "movable memory of the kernel",
    "kernel.unattributed": "memory of the kernel whose owner is not known",
    "reserved": "reserved memory",
    "offline": "memory that the hypervisor took (balloon)",
    "hwpoison": "broken memory (hwpoison)",
    "device": "memory of a device",
    "excluded": "a page whose struct page is not in the dump",
    "unreadable": "a page whose struct page cannot be read",
}
"""Maps a class of pages to its description of one page."""


def summary(
    answer: AddressAnswer, asked: AskedAddress, ends: AddressEnds
) -> tuple[Kind, str]:
    """Return the kind of an answer, and its text."""
    kind, text = _summary(answer, asked, ends)
    return kind, text + _pid_hint(asked)


def _summary(
    answer: AddressAnswer, asked: AskedAddress, ends: AddressEnds
) -> tuple[Kind, str]:
    if asked.space == "kernel" and 0 < asked.number < ends.page_size:
        return "unknown", f"NULL+{asked.number:#x}: a member of a NULL pointer"
    for kind, text in _candidates(answer):
        return kind, text
    poison = None if answer.address is None else poison_text(answer.address)
    if poison is not None:
        return "poison", poison
    if answer.readable is False and asked.space in ("physical", "pfn"):
        return "unmapped", "no struct page describes it: a hole, or memory of a device"
    if answer.readable is False:
        return "unmapped", "nothing is mapped there, or it is not in the dump"
    return "unknown", _unknown(answer, ends)


_MOST_DIGITS = 7
"""Maximum digits of a PID: PID_MAX_LIMIT is 2^22 (include/linux/threads.h)."""


def _pid_hint(asked: AskedAddress) -> str:
    """Return advice in case a word was meant as a PID; empty if it cannot be one."""
    is_pid = asked.word.isdecimal() and len(asked.word) <= _MOST_DIGITS
    is_pid = is_pid and asked.number > 0
    if asked.space != "kernel" or not is_pid:
        return ""
    return f"; for a PID: msa-prstat -p {asked.word}"


def _candidates(answer: AddressAnswer) -> Iterator[tuple[Kind, str]]:
    """Yield the kinds of an answer with their texts, the most specific first."""
    of = _inside(answer)
    if answer.user is not None:
        yield "user", user_text(answer.user, answer.page)
    if answer.stack is not None:
        yield "stack", stack_text(answer.stack)
    if answer.task is not None:
        task = answer.task
        yield "task", f"task {task.pid} ({task.comm}){of}{_stands(task)}"
    if answer.page_struct is not None:
        what = f"struct page of pfn {answer.page_struct.pfn:#x}{of}"
        described = "" if answer.page is None else f": {page_text(answer.page)}"
        yield "page", what + described
    if answer.percpu is not None:
        yield "percpu", percpu_text(answer.percpu) + of
    if answer.slab is not None:
        yield "slab", slab_text(answer.slab, answer.type) + of + _for(answer)
    if answer.symbol is not None and not answer.symbol.freed:
        yield "symbol", symbol_text(answer.symbol) + of
    if answer.vmalloc is not None:
        yield "vmalloc", vmalloc_text(answer.vmalloc)
    if answer.page is not None:
        yield "memory", page_text(answer.page)
    if answer.symbol is not None:
        yield "symbol", symbol_text(answer.symbol)


def _unknown(answer: AddressAnswer, ends: AddressEnds) -> str:
    if answer.address is None:
        return "no symbol of that name"
    if not answer.address:
        return "NULL"
    if answer.address < ends.user_end:
        return "not an address of the kernel; of a process it is PID:ADDRESS"
    if answer.readable is None:
        return "not an address: no memory can be mapped there"
    return "mapped; nothing more is known"


def _stands(task: Task) -> str:
    """Return the end of a task's text: its standing with the scheduler, or nothing."""
    if task.standing is None:
        return ""
    verb = "is " if task.standing.startswith("throttled") else ""
    return f"; it {verb}{task.standing}"


def _inside(answer: AddressAnswer) -> str:
    """Return the member at an address, with the type of lock if it is one."""
    text = f", {answer.member}" if answer.member else ""
    return text + (f" ({answer.lock.partition(' ')[0]})" if answer.lock else "")


def _for(answer: AddressAnswer) -> str:
    return f": {answer.object}" if answer.object else ""


def symbol_text(symbol: Symbol) -> str:
    """Return a symbol with the offset, and the module."""
    module = "" if symbol.module is None else f" [{symbol.module}]"
    if symbol.name == module.strip():
        return f"module {symbol.module}"
    offset = f"+{symbol.offset:#x}" if symbol.offset else ""
    freed = ", whose memory was freed after boot" if symbol.freed else ""
    return f"{symbol.name}{offset}{module}{freed}"


def stack_text(stack: StackPlace) -> str:
    """Return the task of a stack, and the place in it."""
    whose = f"stack of {stack.pid} ({stack.comm})"
    if stack.where == "guard":
        return f"guard page below the {whose}, at which an overflow of it ends"
    frame = f"in frame {stack.frame}, {stack.function or 'unknown function'}"
    if stack.next_function is not None:
        frame += f", or the next, {stack.next_function}"
    where = {
        "frame": frame,
        "unused": "below the stack pointer: remains of earlier calls",
        "registers": "above all frames: registers of user mode",
        "unknown": "its frames are not known",
    }[stack.where]
    return f"{whose}+{stack.offset:#x}, {where}"


def percpu_text(place: PerCpuPlace) -> str:
    """Return a per-CPU variable or allocation, and the CPU."""
    cpu = "a per-CPU pointer" if place.cpu is None else f"of cpu{place.cpu}"
    offset = f"+{place.offset:#x}" if place.offset else ""
    if place.variable is not None:
        return f"{place.variable}{offset}, {cpu}"
    if place.allocated is False:
        return f"free per-CPU memory, {cpu}"
    size = "" if place.bytes is None else f" of {place.bytes:,} bytes"
    return f"per-CPU allocation{size}{offset}, {cpu}"


def slab_text(slab: SlabPlace, type_: str | None) -> str:
    """Return an object of a slab cache, and whether it is allocated."""
    state = {True: "", False: "free ", None: "perhaps free "}[slab.allocated]
    what = f"{type_} of " if type_ else "object of "
    offset = f"+{slab.offset:#x}" if slab.offset else ""
    text = f"{state}{what}{slab.cache}{_or_merged(slab)}{offset}"
    if slab.object_bytes is not None and slab.offset >= slab.object_bytes:
        text += f", after its {slab.object_bytes:,} bytes"
    return text


def _or_merged(slab: SlabPlace) -> str:
    """Return the names of merged caches to which an object may belong as well."""
    names = slab.merged_names
    if not names:
        return ""
    more = slab.merged - len(names[:_NAMED])
    return f" (or {', '.join(names[:_NAMED])}{f' and {more} more' if more > 0 else ''})"


def vmalloc_text(area: VmallocArea) -> str:
    """Return a vmalloc area, the offset in it, and the function that allocated it."""
    if area.guard:
        return f"guard page at the end of a {area_text(area)}"
    offset = f"+{area.offset:#x}" if area.offset else ""
    return area_text(area, offset)


def area_text(area: VmallocArea, offset: str = "") -> str:
    """Return the use of a vmalloc area, and the function that allocated it."""
    by = f" by {area.caller}" if area.caller else ""
    device = "" if area.physical is None else f" of physical {area.physical:#x}"
    return f"{area.use} area{offset}{device}{by}"


def user_text(place: UserPlace, page: Page | None) -> str:
    """Return a place in the memory of a process, and whether a page is there."""
    whose = f"memory of {place.pid} ({place.comm})"
    if place.mapping is None:
        if place.state == "unknown":
            return f"{whose}: its mappings cannot be read"
        if place.state == "none":
            return f"{whose}: it has none, as a kernel thread, or as it has exited"
        return f"{whose}: nothing is mapped there"
    state = {
        "mapped": "" if page is None else f", {page.page_class}",
        "swapped": ", swapped out",
        "absent": ", no page there yet",
        "none": "",
        "unknown": ", its page tables cannot be read",
    }[place.state]
    offset = f"+{place.offset:#x}" if place.offset else ""
    return f"{whose}: {place.mapping}{offset} ({place.protection}){state}"


def page_text(page: Page) -> str:
    """Return the description of a page's class, and its owner."""
    what = _CLASSES.get(page.page_class, page.page_class)
    if page.is_guess:
        what += ", or pages of a driver: this kernel does not distinguish them"
    if page.order and page.page_class.startswith("free"):
        what += f" in a block of {1 << page.order:,}"
    return f"{what}, {page.owner}" if page.owner else what


def owner_text(page: Page) -> str | None:
    """Return the owner of a page: cache, file or processes; ``None`` if unknown."""
    if page.cache is not None:
        return page.cache
    if page.file is not None:
        offset = page.file.offset
        where = "" if offset is None else f"+{offset:#x}"
        return f"{page.file.name}{where}"
    if page.mappers:
        return mappers_text(page.mappers)
    if page.table_owners:
        return _tables_text(page.table_owners)
    return None


def _tables_text(owners: tuple[TableOwner, ...]) -> str:
    """Return the processes that a page table belongs to, and the range that it maps."""
    first, *more = owners
    text = f"{first.pid} ({first.comm}), for {size(first.bytes)} at {first.start:#x}"
    return f"{text} and {len(more)} more" if more else text


def mappers_text(mappers: tuple[PageMapper, ...]) -> str:
    """Return the processes that map a page."""
    named = [f"{each.pid} ({each.comm}) at {each.address:#x}" for each in mappers]
    more = len(named) - _NAMED
    text = ", ".join(named[:_NAMED])
    return f"{text} and {more} more" if more > 0 else text
