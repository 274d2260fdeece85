# SPDX-License-Identifier: LGPL-2.1-or-later

"""Objects in use of slab caches agree with drgn's slab_object_info()."""

import pytest
from drgn import Program
from drgn.helpers.linux.slab import slab_object_info

from fixtures import lab
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import SlabGroup
from msatools.program import TargetSpec, open_target
from msatools.zombies.slabscan import SlabScan
from tests.memory.sums import view

MOST_OBJECTS = 400
"""Maximum objects of a cache that is compared: drgn takes 0.1 ms for each."""


@pytest.fixture(scope="module", params=["5.10", "6.1", "6.12", "7.x", "6.12arm64"])
def prog(request: pytest.FixtureRequest) -> Program:
    run = lab.build(f"memory-{request.param}")
    return open_target(TargetSpec(path=str(run.elf), types="btf")).prog


def test_objects_in_use(prog: Program) -> None:
    groups = view(collect_memstat(prog, by=["slab"]), "slab")
    caches = [g for g in groups if isinstance(g, SlabGroup) and g.kmem_cache]
    scan = SlabScan(Reader(prog), LossLog())
    compared = kept_back = 0
    for cache in caches:
        assert cache.kmem_cache is not None
        if (cache.objects or 0) > MOST_OBJECTS:
            continue
        found = [
            info.allocated
            for address in scan.objects(cache.kmem_cache).tolist()
            if (info := slab_object_info(prog, address)) is not None
        ]
        assert len(found) == cache.objects
        assert cache.objects_in_use == sum(found), cache.name
        compared += 1
        kept_back += 0 < cache.objects_in_use < cache.objects
    assert compared > 20
    # Some caches have both used and free objects.
    assert kept_back > 10
