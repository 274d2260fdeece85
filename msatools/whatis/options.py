# SPDX-License-Identifier: LGPL-2.1-or-later

"""Options of a report of msa-whatis."""

from msatools.records import dataclass
from msatools.whatis.asked import AskedAddress


@dataclass(frozen=True, kw_only=True)
class WhatisOptions:
    """What a report answers."""

    addresses: tuple[AskedAddress, ...]

    waits: bool = False
    """Whether to look through the waits of all tasks for locks in the objects found."""
