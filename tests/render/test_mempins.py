# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tables of the files that pin removed control groups."""

from msatools.memory.model import CgroupGroup, PinningFile
from msatools.render.memstat.breakdowns import pins_table
from tests.render.screens import check_screens
from tests.support.golden import Golden


def group(name: str, *pins: int, files: int | None = None) -> CgroupGroup:
    return CgroupGroup(
        key=name,
        name=name,
        pages=sum(pins),
        classes={"cache.file": sum(pins)},
        dying=bool(pins),
        pinned_by=tuple(PinningFile(f"{n}", f"/f{n}", n) for n in pins) or None,
        files=len(pins) if files is None else files,
    )


def test_golden(golden: Golden) -> None:
    few = [group("/a"), group("/b", 2000, 3), group("/c", 1)]
    many = [group("/a", 30, 20, files=7), group("/b", 4), group("/c", 1)]
    screens = {
        "nothing is removed": pins_table([group("/a")], 5),
        "a row for each file": pins_table(few, None),
        "what is left out is said": pins_table(many, 1),
    }
    check_screens(golden, "mempins", screens)
