# SPDX-License-Identifier: LGPL-2.1-or-later

"""Slab caches agree with /proc/slabinfo and /sys/kernel/slab."""

import pytest
from drgn import Program

from fixtures import lab
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport, SlabGroup

from . import ownertruth
from .sums import view


@pytest.fixture(scope="module")
def slabs(owners_report: MemstatReport) -> dict[str, SlabGroup]:
    groups = view(owners_report, "slab")
    found = [g for g in groups if isinstance(g, SlabGroup) and g.kmem_cache]
    assert len({group.name for group in found}) == len(found) > 50
    return {group.name: group for group in found}


def test_all_caches_are_listed_with_verbose(
    owners_run: lab.Run, owners_prog: Program
) -> None:
    report = collect_memstat(owners_prog, by=["slab"], verbose=True)
    groups = [g for g in view(report, "slab") if isinstance(g, SlabGroup)]
    named = {group.name: group for group in groups if group.kmem_cache}
    recorded = ownertruth.slabinfo(owners_run)
    assert named.keys() == recorded.keys()
    empty = {name for name, (_, objects, *_) in recorded.items() if not objects}
    assert len(empty) > 5
    for name in empty:
        group = named[name]
        assert (group.pages, group.slabs, group.objects_in_use) == (0, 0, 0)


def test_merged_caches_share_their_sysfs_files(
    owners_run: lab.Run, slabs: dict[str, SlabGroup]
) -> None:
    def sysfs(name: str, file: str) -> str:
        return owners_run.truth(f"sys/kernel/slab/{name}/{file}").decode()

    merged = {name: group.merged for name, group in slabs.items() if group.merged}
    assert len(merged) > 5
    for name, others in merged.items():
        for other in others:
            for file in ("order", "objs_per_slab", "objects", "aliases"):
                assert sysfs(other, file) == sysfs(name, file)
