# SPDX-License-Identifier: LGPL-2.1-or-later

"""Futexes that tasks wait on."""

from collections import Counter
from typing import NamedTuple

import drgn
from drgn.helpers.linux.mm import vma_find

from msatools.locks.layout import KERNEL
from msatools.locks.look import FEW_READS, MAX_CANDIDATES, Case, Look
from msatools.locks.model import On
from msatools.locks.user.futexes import Key, Waiter
from msatools.target.model import Address

_MAX_VECTOR = 128
"""``FUTEX_WAITV_MAX``."""


def futex(look: Look, case: Case) -> On | None:
    """Tell one or more futexes."""
    waiters, counts = waiters_of(look, case)
    if not waiters:
        return None
    ends = look.ends(case)
    if len(waiters) > 1:
        places = [waiter.key.address for waiter in waiters]
        told = tuple(Address(place) for place in places if place is not None)
        return On(
            kind="futex",
            addresses=told if len(told) == len(places) else None,
            count=len(places),
            **ends,
        )
    (waiter,) = waiters
    if counts is None and case.call != "futex_waitv":
        look.findings.note(
            "waiters-not-counted",
            f"{FEW_READS} or more wait in the bucket of one futex; they were not "
            "counted",
        )
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


def waiters_of(look: Look, case: Case) -> tuple[list[Waiter], Counter[Key] | None]:
    """Find what a task waits on, and how many wait on each futex.

    :return: One waiter, or those of ``futex_waitv()`` as they were asked for; none if
        they are not to be found. No counts if there were too many to look at.
    """
    if look.alone:
        return _own_futexes(look, case)
    by_task, counts = look.waiters
    waiters = by_task.get(case.address, [])
    if not waiters:
        # Its chain is broken, or it has come since.
        waiters, _ = _own_futexes(look, case)
    # Of several it is an array.
    return sorted(waiters, key=lambda waiter: waiter.address), counts


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
    mapping = mapping_at(look, case.mm, address)
    if mapping is None or not mapping.file:
        return None, None
    if mapping.file_offset(address) != key.file_offset:
        return None, None
    inode = look.layout.member(mapping.file, "file", "f_inode")
    number = look.layout.member(inode, "inode", "i_sequence")
    if number != key.object:
        return None, None
    return address, look.storage.inode(inode).number


class Mapping(NamedTuple):
    """A part of an address space, a ``struct vm_area_struct``."""

    start: int
    end: int
    page: int
    """Where in the file it starts, in pages."""

    file: int
    """The ``struct file``; 0 if it is of none."""

    def file_offset(self, address: int) -> int:
        """Tell where in the file an address is."""
        return self.page * 4096 + address - self.start


def mapping_at(look: Look, mm: int, address: int) -> Mapping | None:
    """Find what is mapped at an address."""
    if not mm:
        return None
    space = drgn.Object(look.reader.prog, "struct mm_struct *", value=mm)
    vma = vma_find(space, address)
    if not vma:
        return None
    names = ("vm_start", "vm_end", "vm_pgoff", "vm_file")
    return Mapping(*look.layout.members(vma.value_(), "vm_area_struct", *names))
