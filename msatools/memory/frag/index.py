# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel's two indices of fragmentation (mm/vmstat.c), in thousandths."""


def unusable(blocks: tuple[int, ...], order: int) -> int | None:
    """Compute the kernel's unusable free space index, in thousandths.

    :param blocks: Free blocks by order.
    """
    free = sum(count << each for each, count in enumerate(blocks))
    if not free:
        return None
    small = sum(count << each for each, count in enumerate(blocks[:order]))
    return small * 1000 // free


def fragmentation(blocks: tuple[int, ...], order: int) -> int | None:
    """Compute the kernel's external fragmentation index, in thousandths.

    :return: ``None`` if a block of the order is free.
    """
    if any(blocks[order:]):
        return None
    total = sum(blocks)
    if not total:
        return 0
    free = sum(count << each for each, count in enumerate(blocks))
    return 1000 - (1000 + (free * 1000 >> order)) // total
