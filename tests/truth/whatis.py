# SPDX-License-Identifier: LGPL-2.1-or-later

"""Facts of msa-whatis: addresses that a guest knows.

A guest of ``memory`` recorded the page frame of each page of its regions
(/proc/PID/pagemap), and one of ``lockmodule`` the symbols and locks of its module.
"""

from collections.abc import Callable, Iterator
from typing import Any

from fixtures.lab import Run
from tests.truth.fact import Fact, Figures

_KERNEL_HALF = 1 << 63
_EACH = 12
"""Pages that are asked about of each region."""

_CLASSES = {
    "anon": "user.anon",
    "file": "cache.file",
    "hugetlb": "user.hugetlb",
    "hugetlb-shared": "user.hugetlb",
    "mlock": "user.anon",
    "shmem-memfd": "cache.shmem",
    "shmem-sysv": "cache.shmem",
    "shmem-thp": "cache.shmem",
    "shmem-tmpfs": "cache.shmem",
    "thp": "user.anon",
}
"""Class of the pages of a region, where all have the same."""

_MAPPED = (
    *("anon", "mlock", "thp", "shmem-memfd", "shmem-sysv", "shmem-tmpfs"),
    *("hugetlb", "hugetlb-shared"),
)
"""Regions whose pages few processes map."""


def asks(run: Run) -> list[str]:
    """Return the addresses to ask about: all that the facts need."""
    pages = [word for word, _, _ in _pages(run)]
    workload = run.workload
    symbols = list(workload.get("symbols", {}).values())
    locks = [_word(lock) for lock in _locks(run) if lock["waiters"]]
    return [*dict.fromkeys((*pages, *symbols, *locks))]


def _word(lock: Any) -> str:
    """Return how to ask for a lock: a futex is in the memory of its waiters."""
    address: str = lock["address"]
    if int(address, 16) >= _KERNEL_HALF:
        return address
    return f"{lock['waiters'][0]['pid']}:{address}"


def _pages(run: Run) -> Iterator[tuple[str, str, int | None]]:
    """Yield addresses in regions: as asked, the region, and the pfn."""
    for process in run.workload.get("processes", ()):
        for region in process.get("regions", ()):
            pfns = run.pfns(region["name"])
            size = region["bytes"] // len(pfns)
            for number in range(0, len(pfns), max(len(pfns) // _EACH, 1)):
                address = region["address"] + number * size + number % size
                yield f"{process['pid']}:{address:#x}", region["name"], pfns[number]


def _locks(run: Run) -> list[Any]:
    return [lock for lock in run.workload.get("locks", ()) if lock.get("address")]


def _answers(value: Callable[[Any], Any]) -> Callable[[Any], Figures]:
    """Return a function of a report: what is asked -> a value of the answer."""
    return lambda report: {
        answer["asked"]: value(answer) for answer in report["answers"]
    }


def _recorded(value: Callable[[str, int], Any], *regions: str) -> Any:
    """Return a function of a run: what is asked -> a value of a page that is there."""

    def recorded(run: Run) -> Figures:
        if not run.workload.get("processes"):
            raise LookupError("no regions are recorded")
        return {
            word: value(region, pfn)
            for word, region, pfn in _pages(run)
            if pfn is not None and (not regions or region in regions)
        }

    return recorded


def _mapped(report: Any) -> Figures:
    """Return whether the process of an address is among those that map the page."""
    size = report["target"]["page_size"]
    return {
        answer["asked"]: _mapped_by_itself(answer, size) for answer in report["answers"]
    }


def _mapped_by_itself(answer: Any, page_size: int) -> bool:
    user, page = answer.get("user"), answer.get("page", {})
    if user is None:
        return False
    place = int(answer["address"], 16) & -page_size
    return any(
        (each["pid"], int(each["address"], 16)) == (user["pid"], place)
        for each in page.get("mappers") or ()
    )


def _symbols(run: Run) -> Figures:
    """Return the names of symbols that share their address with no other."""
    if "symbols" not in run.workload:
        raise LookupError("no symbols are recorded")
    by_address: dict[str, set[str]] = {}
    for name, address in run.workload["symbols"].items():
        # Not pointers to the module's per-CPU variables, nor labels of the compiler.
        if int(address, 16) >= 1 << 63 and not name.startswith("."):
            by_address.setdefault(address, set()).add(name)
    return {
        address: (names.pop(), 0)
        for address, names in by_address.items()
        if len(names) == 1
    }


def _symbol(answer: Any) -> Any:
    symbol = answer.get("symbol")
    return symbol and (symbol["name"], symbol["offset"])


def _waiters(report: Any) -> Figures:
    """Return the waiters of locks: of those in the kernel by their address."""
    found = {lock["address"]: {*(lock["waiters"] or ())} for lock in report["locks"]}
    by_id = {lock["id"]: {*(lock["waiters"] or ())} for lock in report["locks"]}
    asked = {each["asked"]: by_id.get(each.get("lock")) for each in report["answers"]}
    return found | {word: pids for word, pids in asked.items() if pids is not None}


def _recorded_waiters(run: Run) -> Figures:
    if "locks" not in run.workload:
        raise LookupError("no locks are recorded")
    # Of a semaphore or a completion only waiters are recorded.
    return {
        _word(lock): {one["pid"] for one in lock["waiters"]}
        for lock in _locks(run)
        if lock["waiters"]
    }


FACTS = (
    Fact(
        name="page at an address of a process",
        reported=_answers(lambda answer: answer.get("page", {}).get("pfn")),
        recorded=_recorded(lambda region, pfn: pfn),
    ),
    Fact(
        name="class of a page",
        reported=_answers(lambda answer: answer.get("page", {}).get("class")),
        recorded=_recorded(lambda region, pfn: _CLASSES[region], *_CLASSES),
    ),
    Fact(
        name="process that maps a page",
        reported=_mapped,
        recorded=_recorded(lambda region, pfn: True, *_MAPPED),
    ),
    Fact(
        name="symbol of a module",
        reported=_answers(_symbol),
        recorded=_symbols,
    ),
    Fact(
        name="waiters of a lock",
        reported=_waiters,
        recorded=_recorded_waiters,
    ),
    Fact(
        name="object of a lock",
        reported=_answers(
            lambda answer: (
                answer.get("slab")
                and (answer["slab"]["cache"], answer["slab"]["object"])
            )
        ),
        recorded=lambda run: {
            lock["address"]: (lock["cache"], lock["object"])
            for lock in _locks(run)
            if lock.get("object")
        },
    ),
)
