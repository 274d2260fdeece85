# SPDX-License-Identifier: LGPL-2.1-or-later

"""Futexes that tasks wait on."""

from collections import Counter

import drgn
from drgn.helpers.linux.mm import vma_find

from msatools.locks.futexes import Key, Waiter
from msatools.locks.layout import KERNEL
from msatools.locks.look import FEW_READS, MAX_CANDIDATES, Case, Look
from msatools.locks.model import On
from msatools.target.model import Address

_MAX_VECTOR = 128
"""``FUTEX_WAITV_MAX``."""


def futex(look: Look, case: Case) -> On | None:
    """Tell one or more futexes."""
    if look.alone:
        waiters, counts = _own_futexes(look, case)
    else:
        by_task, counts = look.waiters
        waiters = by_task.get(case.address, [])
        if not waiters:
            # Its chain is broken, or it has come since.
            waiters, _ = _own_futexes(look, case)
    if not waiters:
        return None
    ends = look.ends(case)
    if len(waiters) > 1:
        # As they were asked for: it is an array.
        by_place = sorted(waiters, key=lambda waiter: waiter.address)
        places = [waiter.key.address for waiter in by_place]
        told = tuple(Address(place) for place in places if place is not None)
        return On(
            kind="futex",
            addresses=told if len(told) == len(places) else None,
            count=len(places),
            **ends,
        )
    (waiter,) = waiters
    key = waiter.key
    address, inode = key.address, None
    if key.of_inode:
        address, inode = _in_file(look, case, key)
    owner = _pi_owner(look, waiter)
    return On(
        kind="futex",
        type="pi_futex" if waiter.pi_state else None,
        address=None if address is None else Address(address),
        shared=key.shared,
        inode=inode,
        waiters=counts.get(key) if counts is not None else None,
        owner=owner,
        **ends,
    )


def _own_futexes(look: Look, case: Case) -> tuple[list[Waiter], Counter[Key] | None]:
    """Find what one task waits on without a look at all who wait."""
    stack = case.stack
    for waiter in look.futexes.on_stack(stack.base, stack.words, case.address):
        others = list(look.futexes.chain(waiter.lock, FEW_READS))
        counts = Counter(other.key for other in others)
        if len(others) < FEW_READS:
            if any(other.address == waiter.address for other in others):
                return [waiter], counts
            continue
        look.findings.note(
            "waiters-not-counted",
            f"{FEW_READS} or more wait in the bucket of one futex; they were not "
            "counted",
        )
        if _is_queued(look, waiter):
            return [waiter], None
    if case.call == "futex_waitv":
        return _vector(look, case), None
    return [], None


def _is_queued(look: Look, waiter: Waiter) -> bool:
    """Tell whether the neighbours of a waiter know it."""
    node = waiter.address + look.layout.offset("futex_q", "list.node_list")
    following, before = look.layout.word(node), look.layout.word(node + 8)
    return look.layout.word(following + 8) == node and look.layout.word(before) == node


def _vector(look: Look, case: Case) -> list[Waiter]:
    """Find the waiters of ``futex_waitv()``, an array that is on the heap."""
    count = case.arguments[1]
    if not 0 < count <= _MAX_VECTOR:
        return []
    size = look.layout.size("futex_vector")
    first = look.layout.offset("futex_vector", "q")
    for pointer in case.stack.data_pointers()[:MAX_CANDIDATES]:
        try:
            head = look.futexes.read(pointer + first)
            if head.task != case.address or head.lock < KERNEL:
                continue
            places = range(pointer + first, pointer + first + count * size, size)
            waiters = [look.futexes.read(place) for place in places]
        except drgn.FaultError:
            continue
        if all(w.task == case.address and w.lock >= KERNEL for w in waiters):
            return waiters
    return []


def _pi_owner(look: Look, waiter: Waiter) -> int | None:
    if not waiter.pi_state:
        return None
    owner = look.layout.member(waiter.pi_state, "futex_pi_state", "owner")
    return look.pid(owner) if owner else None


def _in_file(look: Look, case: Case, key: Key) -> tuple[int | None, int | None]:
    """Find where a futex of a file is mapped, and the inode, by the call.

    What the call names may have been changed by others since: the key has to fit.
    """
    if case.call not in ("futex", "futex_wait"):
        return None, None
    address = case.arguments[0]
    vma = _mapping_at(look, case.mm, address)
    if vma is None:
        return None, None
    start, page, file = vma
    offset = page * 4096 + address - start
    if not file or offset != key.file_offset:
        return None, None
    inode = look.layout.member(file, "file", "f_inode")
    number = look.layout.member(inode, "inode", "i_sequence")
    if number != key.object:
        return None, None
    return address, look.storage.inode(inode).number


def _mapping_at(look: Look, mm: int, address: int) -> tuple[int, int, int] | None:
    """Find a mapping's start, its page in the file, and the file."""
    if not mm:
        return None
    space = drgn.Object(look.reader.prog, "struct mm_struct *", value=mm)
    vma = vma_find(space, address)
    if not vma:
        return None
    names = ("vm_start", "vm_pgoff", "vm_file")
    start, page, file = look.layout.members(vma.value_(), "vm_area_struct", *names)
    return start, page, file
