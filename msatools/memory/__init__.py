# SPDX-License-Identifier: LGPL-2.1-or-later

"""Physical memory by class: msa-memstat.

``memstat`` collects the report in ``model``: the ``scan`` of the ``memmap`` sums pages
by their ``classes``; ``refine`` and ``owners`` find classes that struct page does not
record. A break-down is a file ``by_...``, and a line of the table in ``breakdowns``.
"""

__all__ = (
    "classes",
    "memstat",
    "model",
)
