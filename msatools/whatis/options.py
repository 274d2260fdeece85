# SPDX-License-Identifier: LGPL-2.1-or-later

"""Options of a report of msa-whatis."""

from msgspec import Struct

from msatools.whatis.asked import AskedAddress


class WhatisOptions(Struct, frozen=True, kw_only=True):
    """What a report answers."""

    addresses: tuple[AskedAddress, ...]

    waits: bool = False
    """Whether to look through the waits of all tasks for locks in the objects found."""
