# SPDX-License-Identifier: LGPL-2.1-or-later

"""Answers what lies at addresses: the session of msa-whatis."""

from collections.abc import Iterator

from msatools.kernel.clocks import read_clocks
from msatools.kernel.session import KernelSession, Progress
from msatools.target.addresses import KERNEL_HALF
from msatools.whatis.finder import AddressFinder
from msatools.whatis.locks import from_waits
from msatools.whatis.lookup import Lookup
from msatools.whatis.model import (
    AddressAnswer,
    LockThere,
    WhatisReport,
)
from msatools.whatis.options import WhatisOptions


class Whatis(KernelSession[WhatisReport, WhatisOptions]):
    """A run of reports on one kernel: see :class:`msatools.kernel.session.Session`."""

    def report(self, progress: Progress) -> WhatisReport:
        """Report what lies at the addresses now."""
        asked = self._options.addresses
        with self._reporting():
            clocks = read_clocks(self._reader, self._losses)
            lookup = Lookup(self._reader, clocks, self._losses)
            finder = AddressFinder(lookup, self._target)
            answers = []
            for number, each in enumerate(asked):
                progress(number, len(asked))
                answers.append(finder.answer(each))
            locks = list(finder.locks.values())
            if self._options.waits:
                locks += self._waited_for(answers, finder.locks)
        head = self._head(clocks.monotonic_ns)
        return WhatisReport(**head, answers=tuple(answers), locks=tuple(locks))

    def _waited_for(
        self, answers: list[AddressAnswer], known: dict[str, LockThere]
    ) -> Iterator[LockThere]:
        """Yield the locks in the objects found that tasks wait for.

        The waits of all tasks are read for it.
        """
        # It is rarely asked for, and slow to import.
        from msatools.locks.locks import collect_locks

        ranges = [_extent(answer) for answer in answers]
        for row in collect_locks(self._prog, target=self._target).locks:
            lock = from_waits(row)
            if lock is None or lock.id in known:
                continue
            if any(start <= lock.address < end for start, end in ranges):
                yield lock


def _extent(answer: AddressAnswer) -> tuple[int, int]:
    """Return start and end of the object of an answer."""
    if answer.slab is not None:
        return answer.slab.object, answer.slab.object + answer.slab.bytes
    if answer.page_struct is not None or answer.address is None:
        return 0, 0
    if answer.address < KERNEL_HALF:
        # Of a process: another may have a futex at the same address.
        return 0, 0
    return answer.address, answer.address + 1
