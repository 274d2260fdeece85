# SPDX-License-Identifier: LGPL-2.1-or-later

"""The first lines of each report: see ``tests/golden/header.txt``."""

from msgspec.structs import replace

from msatools.program import Crash
from msatools.program.model import Source
from msatools.render.header import header
from tests.locks.madelocks import TARGET
from tests.render.screens import check_screens
from tests.support.golden import Golden

KDUMP = replace(
    TARGET, kind="kdump", types="dwarf", dump_level=31, format="kdump zlib, flattened"
)


def test_golden(golden: Golden) -> None:
    sources = (
        Source("kernel", "btf", None),
        Source("lo\x1bop", "dwarf", "/tmp/loop.ko"),
    )
    described = replace(KDUMP, types="btf", sources=sources)
    crashes = (
        Crash("Oops: 2", 3, 42, "bad\x1b"),
        Crash(None, 0, None, None),
        Crash("BUG", 0, 0, None),
    )
    screens = {
        "with a level": header(KDUMP),
        "without": header(replace(KDUMP, dump_level=None)),
        "ELF": header(TARGET),
        "running": header(replace(TARGET, kind="kcore", format="")),
        "a guest": header(replace(TARGET, kind="qmp", format="")),
        "facts of the command": header(KDUMP, "8 reads", "100% covered"),
        "truncated": header(replace(KDUMP, truncated=True)),
        **{f"{crash}": header(replace(KDUMP, crash=crash)) for crash in crashes},
        "sources of types": header(described),
        "sources of types, -v": header(described, verbose=True),
    }
    check_screens(golden, "header", screens)
