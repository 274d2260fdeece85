# SPDX-License-Identifier: LGPL-2.1-or-later

"""Where the memory is: msa-memstat.

``memstat`` collects a report of ``model``: the ``scan`` of the ``memmap`` sums pages by
their ``classes``; ``refine`` and ``owners`` know what struct page does not say. A
break-down is a file ``by_...``, and a line of the table in ``breakdowns``.
"""

__all__ = (
    "classes",
    "memstat",
    "model",
)
