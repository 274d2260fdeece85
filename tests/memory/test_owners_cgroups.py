# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages by control group agree with memory.stat and /proc/kpagecgroup."""

import pytest

from fixtures import lab
from msatools.memory.model import CgroupGroup, MemstatReport

from .ownertruth import PAGE
from .sums import pages_of, view

Cgroups = dict[str, CgroupGroup]
DELETED = " (deleted)"


@pytest.fixture(scope="module")
def cgroups(owners_report: MemstatReport) -> Cgroups:
    """Control groups by path."""
    groups = view(owners_report, "cgroup")
    return {g.name: g for g in groups if isinstance(g, CgroupGroup) and g.mem_cgroup}


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


def test_slabs_have_a_group_of_their_own(
    owners_run: lab.Run, owners_report: MemstatReport
) -> None:
    (slabs,) = (g for g in view(owners_report, "cgroup") if g.key == "-slab")
    assert set(slabs.classes) == {"kernel.slab"}
    assert 0 < slabs.pages < pages_of(owners_report)["kernel.slab"]
    assert [note.code for note in owners_report.notes] == ["slab-charges"]
