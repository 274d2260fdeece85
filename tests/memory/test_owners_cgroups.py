# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages by control group agree with memory.stat and /proc/kpagecgroup."""

from collections import Counter

import numpy as np
import pytest

from fixtures import lab
from msatools.memory.model import CgroupGroup, MemstatReport

from .ownertruth import PAGE
from .sums import pages_of, view
from .truth import having, page_flags

Cgroups = dict[str, CgroupGroup]
DELETED = " (deleted)"


@pytest.fixture(scope="module")
def cgroups(owners_report: MemstatReport) -> Cgroups:
    """Control groups by path."""
    groups = view(owners_report, "cgroup")
    return {g.name: g for g in groups if isinstance(g, CgroupGroup) and g.mem_cgroup}


def test_keys_are_inodes_of_the_groups(owners_run: lab.Run, cgroups: Cgroups) -> None:
    for path, inode in owners_run.workload["cgroups"].items():
        if f"/{path}" in cgroups:
            assert cgroups[f"/{path}"].key == str(inode)
    assert cgroups["/"].key == "1"
    assert not any(cgroups[name].dying for name in cgroups if DELETED not in name)


def test_removed_groups_and_the_files_that_pin_them(
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
        # Kernel memory was reparented.
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
        sizes = [-pin.pages for pin in group.pinned_by]
        assert sizes == sorted(sizes)


def test_charges_of_all_pages(owners_run: lab.Run, cgroups: Cgroups) -> None:
    """Charges agree with /proc/kpagecgroup, which has the inode of each page's group.

    For a removed group it has the nearest existing ancestor. Up to v6.5 it has nothing
    for tails of compound pages.
    """
    recorded = np.frombuffer(owners_run.truth("proc/kpagecgroup"), np.uint64)
    flags = page_flags(owners_run)
    single = ~having(flags, "COMPOUND_HEAD") & ~having(flags, "COMPOUND_TAIL")
    pages = Counter(recorded[single].tolist())
    ids = owners_run.workload["cgroups"]
    for name in ("service/web", "service/reader", "batch"):
        assert pages[ids[name]] == cgroups[f"/{name}"].pages, name
    (old,) = (g for g in owners_run.workload["removed"] if g["path"] == "service/old")
    assert pages[ids["service"]] == old["stat"]["file"] // PAGE


def test_slabs_have_a_group_of_their_own(
    owners_run: lab.Run, owners_report: MemstatReport
) -> None:
    (slabs,) = (g for g in view(owners_report, "cgroup") if g.key == "-slab")
    assert set(slabs.classes) == {"kernel.slab"}
    assert 0 < slabs.pages < pages_of(owners_report)["kernel.slab"]
    assert [note.code for note in owners_report.notes] == ["slab-charges"]
