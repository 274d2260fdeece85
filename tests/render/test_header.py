# SPDX-License-Identifier: LGPL-2.1-or-later

import io
from dataclasses import replace

import pytest

from msatools.render import plain
from msatools.render.header import header
from msatools.target import Crash, Target
from msatools.target.model import Source

TARGET = Target(
    path="vmcore",
    kind="kdump",
    live=False,
    release="6.1.0",
    arch="x86_64",
    page_size=4096,
    types="dwarf",
    dump_level=31,
    truncated=False,
    crash=None,
    format="kdump zlib, flattened",
)


def lines(target: Target, *facts: str, verbose: bool = False) -> list[str]:
    out = io.StringIO()
    plain.show(header(target, *facts, verbose=verbose), out)
    return out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "vmcore (kdump zlib, flattened, level 31)"),
        ({"dump_level": None}, "vmcore (kdump zlib, flattened)"),
        ({"kind": "elf", "format": "ELF", "dump_level": None}, "vmcore (ELF)"),
        ({"kind": "kcore", "format": "", "dump_level": None}, "live"),
        ({"kind": "qmp", "format": "", "dump_level": None}, "live guest"),
    ],
)
def test_kinds(changes: dict[str, object], expected: str) -> None:
    target = replace(TARGET, **changes)  # type: ignore[arg-type]
    assert lines(target) == [f"6.1.0  {expected}  types: dwarf"]


def test_facts_of_the_command() -> None:
    assert lines(TARGET, "8 reads", "100% covered")[0].endswith(
        "types: dwarf  8 reads, 100% covered"
    )


def test_truncation_has_a_line() -> None:
    assert lines(replace(TARGET, truncated=True))[1].startswith("truncated")


@pytest.mark.parametrize(
    ("crash", "expected"),
    [
        (
            Crash("Oops: 2", 3, 42, "bad\x1b"),
            r"crashed: Oops: 2, CPU 3, pid 42 bad\x1b",
        ),
        (
            Crash(None, 0, None, None),
            "crashed: the kernel log does not tell why, CPU 0",
        ),
        (Crash("BUG", 0, 0, None), "crashed: BUG, CPU 0, pid 0 -"),
    ],
)
def test_crash_has_a_line(crash: Crash, expected: str) -> None:
    assert lines(replace(TARGET, crash=crash))[1] == expected


def test_sources_of_types() -> None:
    kernel = Source("kernel", "btf", None)
    module = Source("lo\x1bop", "dwarf", "/tmp/loop.ko")
    target = replace(TARGET, types="btf", sources=(kernel, module))
    assert len(lines(target)) == 1
    assert lines(target, verbose=True)[1:] == [
        "types of kernel: btf, from the kernel itself",
        "types of lo\\x1bop: dwarf, from /tmp/loop.ko",
        "types of other modules: not asked for",
    ]
