# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages by control group, held against memory.stat and /proc/kpagecgroup."""

import numpy as np
import pytest
from drgn import Program

from fixtures import lab
from msatools.memory.by.groups import CgroupGroup
from msatools.memory.model import MemstatReport

from .asked import printed
from .ownertruth import PAGE
from .truth import having, page_flags

Cgroups = dict[str, CgroupGroup]
DELETED = " (deleted)"


@pytest.fixture(scope="module")
def cgroups(owners_report: MemstatReport) -> Cgroups:
    """By path."""
    assert owners_report.by is not None
    groups = owners_report.by["cgroup"]
    return {g.name: g for g in groups if isinstance(g, CgroupGroup) and g.mem_cgroup}


def test_keys_are_inodes_of_the_groups(owners_run: lab.Run, cgroups: Cgroups) -> None:
    for path, inode in owners_run.workload["cgroups"].items():
        if f"/{path}" in cgroups:
            assert cgroups[f"/{path}"].key == str(inode)
    assert cgroups["/"].key == "1"
    assert not any(cgroups[name].dying for name in cgroups if DELETED not in name)


def test_removed_groups_and_what_pins_them(
    owners_run: lab.Run, cgroups: Cgroups
) -> None:
    removed = owners_run.workload["removed"]
    assert {name for name in cgroups if DELETED in name} == {
        f"/{group['path']}{DELETED}" for group in removed
    }
    for before in removed:
        group = cgroups[f"/{before['path']}{DELETED}"]
        assert group.dying
        assert group.key == str(before["inode"])
        # What was the kernel's went over to the parent.
        assert group.pages == before["stat"]["file"] // PAGE
        assert group.classes.get("cache.shmem", 0) == before["stat"]["shmem"] // PAGE
        pins = {
            f"/mnt/data/{name}": owners_run.workload["sizes"][name] // PAGE
            for name in before["files"]
        }
        if before["tmpfs"]:
            pins["/mnt/tmpfs/pinned"] = before["tmpfs"] // PAGE
        assert group.pinned_by is not None
        assert {pin.name: pin.pages for pin in group.pinned_by} == pins
        assert group.files == len(pins)
        sizes = [pin.pages for pin in group.pinned_by]
        assert sizes == sorted(sizes, reverse=True)


def test_removed_groups_are_shown_with_their_files(
    owners_prog: Program,
) -> None:
    text = printed(owners_prog, "--by", "cgroup", "--top", 3)
    words = [line.split() for line in text.splitlines()]
    assert ["768", "/gone", "(deleted)", "/mnt/data/pinned-a"] in words
    assert ["512", "/service/old", "(deleted)", "/mnt/data/pinned-c"] in words


def test_charges_of_all_pages(owners_run: lab.Run, cgroups: Cgroups) -> None:
    """The kernel says of each page to which group it is charged.

    Of those of removed groups it says the next above that is still there; of tails of
    compound pages nothing up to v6.5, but of their heads.
    """
    said = np.frombuffer(owners_run.truth("proc/kpagecgroup"), np.uint64)
    flags = page_flags(owners_run)
    single = ~having(flags, "COMPOUND_HEAD") & ~having(flags, "COMPOUND_TAIL")
    inodes, counts = np.unique(said[single], return_counts=True)
    pages = dict(zip(inodes.tolist(), counts.tolist(), strict=True))
    removed = {
        g["path"]: g["stat"]["file"] // PAGE for g in owners_run.workload["removed"]
    }
    expected = {name: group.pages for name, group in cgroups.items()}
    ids = owners_run.workload["cgroups"]
    assert pages[ids["service/web"]] == expected["/service/web"]
    assert pages[ids["service/reader"]] == expected["/service/reader"]
    assert pages[ids["service"]] == removed["service/old"]
    assert pages[ids["batch"]] == expected["/batch"]


def test_slabs_are_apart(owners_run: lab.Run, owners_report: MemstatReport) -> None:
    assert owners_report.by is not None
    (slabs,) = (g for g in owners_report.by["cgroup"] if g.key == "-slab")
    assert set(slabs.classes) == {"kernel.slab"}
    total = next(c.pages for c in owners_report.classes if c.name == "kernel.slab")
    assert 0 < slabs.pages < total
    assert [note.code for note in owners_report.notes] == ["slab-charges"]
