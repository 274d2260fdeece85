# SPDX-License-Identifier: LGPL-2.1-or-later

"""Memory of the kernel that one module has: what a module that leaks has most of.

From one dump nobody can tell a leak from use: this names who has how much of what, and
how that is known. Two dumps (``--diff``) show what has grown.
"""

from collections.abc import Iterator, Sequence

from msatools.memory.by.groups import PageGroup, SlabGroup, VmallocGroup
from msatools.memory.model import Leak
from msatools.memory.unattributed.model import UnattributedGroup
from msatools.tasks.unloaded import is_unloaded

_SURE = 0.9
"""Share of the objects of a sample from which on their module is likely."""

_HOLDS = 3

_OWN = ("kernel.vmalloc", "kernel.vmap", "kernel.stacks")
"""Classes of pages that who made an area has."""


def find_leaks(
    slabs: Sequence[PageGroup],
    areas: Sequence[PageGroup],
    blocks: Sequence[UnattributedGroup],
    page_size: int,
) -> tuple[Leak, ...]:
    """Return what modules have, the most first.

    :param slabs: Slab caches (``--by slab``).
    :param areas: Callers of vmalloc (``--by vmalloc``).
    :param blocks: Pages that no owner explains.
    """
    found = [
        *_in_slabs(slabs, page_size),
        *_in_areas(areas, page_size),
        *_in_blocks(blocks, page_size),
    ]
    return tuple(sorted(found, key=lambda leak: (-leak.bytes, leak.module)))


def _in_slabs(groups: Sequence[PageGroup], page_size: int) -> Iterator[Leak]:
    for group in groups:
        if isinstance(group, SlabGroup) and group.module is not None:
            is_sure = (group.module_share or 0) >= _SURE
            is_sure &= not is_unloaded(group.module)
            yield Leak(
                cache=group.name,
                objects=group.objects_in_use,
                bytes=group.pages * page_size,
                holds=tuple(word.name for word in (group.words or ())[:_HOLDS]),
                module=group.module,
                confidence="likely" if is_sure else "evidence",
            )


def _in_areas(groups: Sequence[PageGroup], page_size: int) -> Iterator[Leak]:
    for group in groups:
        if isinstance(group, VmallocGroup) and group.module is not None:
            pages = sum(group.classes.get(name, 0) for name in _OWN)
            if not pages:
                continue  # it maps what others have
            yield Leak(
                area=group.key,
                objects=group.areas,
                bytes=pages * page_size,
                module=group.module,
                # The area itself records who asked for it.
                confidence="exact",
            )


def _in_blocks(groups: Sequence[UnattributedGroup], page_size: int) -> Iterator[Leak]:
    for group in groups:
        if group.content == "module" and group.owner is not None:
            yield Leak(
                order=group.order,
                objects=group.blocks,
                bytes=group.pages * page_size,
                holds=tuple(word.name for word in group.words[:_HOLDS]),
                module=group.owner,
                confidence="evidence",
            )
