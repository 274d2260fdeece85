# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the guest's half makes of what its tasks say: locks, and roots of chains."""

from typing import Any

from fixtures.lab.guest import fuse
from fixtures.lab.guest.locks import locks_of, roots_of

Task = dict[str, Any]


def task(tid: int, group: str = "LCK", /, **on: Any) -> Task:
    return {"pid": tid, "tid": tid, "class": group, "on": on or None, "start_ns": tid}


def owned(name: str, *owners: int) -> dict[str, Any]:
    known = [{"pid": pid, "confidence": "exact"} for pid in owners]
    return {"lock": name, "kind": "mutex", "owners": known}


def roots(*tasks: Task) -> list[dict[str, Any]]:
    named = {str(task["tid"]): task for task in tasks}
    return roots_of(named, locks_of(named))


def test_root_of_a_chain_is_its_end() -> None:
    (root,) = roots(task(1, "TMR"), task(2, **owned("a", 1)), task(3, **owned("b", 2)))
    assert (root["kind"], root["pid"], root["blocks"]) == ("task", 1, [2, 3])


def test_root_of_a_ring_is_the_ring() -> None:
    (root,) = roots(
        task(1, **owned("b", 2)), task(2, **owned("a", 1)), task(3, **owned("b", 2))
    )
    assert (root["kind"], root["pids"], root["blocks"]) == ("cycle", [1, 2], [3])


def test_server_that_waits_is_not_the_root() -> None:
    folio = {"lock": "f", "kind": "folio", "fuse_server": 2, "mount": "/m"}
    (root,) = roots(task(1, "DSK", **folio), task(2, **owned("a", 3)), task(3, "TMR"))
    assert (root["kind"], root["pid"], root["blocks"]) == ("task", 3, [1, 2])
    (root,) = roots(task(1, "DSK", **folio), task(2, "TMR"))
    assert (root["kind"], root["pid"], root["blocks"]) == ("external", 2, [1])


def test_structs_of_fuse_have_their_sizes() -> None:
    sizes = {fuse.REQUEST: 40, fuse.REPLY: 16, fuse.INITIAL: 64, fuse.ATTRIBUTES: 88}
    assert {layout: layout.size for layout in sizes} == sizes
    assert fuse.ENTRY.size + fuse.ATTRIBUTES.size == 128
