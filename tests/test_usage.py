# SPDX-License-Identifier: LGPL-2.1-or-later

"""The memory of tests is bounded, and its peak includes that of other processes."""

import subprocess
import sys
from functools import cache

import pytest

from tests.support import usage

MIB = 1 << 20
SIZE = 64 * MIB
HOLDER = f"held = bytearray({SIZE}); print(flush=True); input()"


@cache
def remembered() -> bytearray:
    return bytearray(SIZE)


def test_large_process_drops_what_tests_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remembered()
    trimmer = usage.Trimmer()
    # What other tests have left must not count.
    monkeypatch.setattr(
        trimmer, "_limit", usage.anonymous_bytes(usage.os.getpid()) + SIZE
    )
    trimmer.pytest_runtest_logfinish()
    assert remembered.cache_info().currsize == 1
    before = usage.anonymous_bytes(usage.os.getpid())
    monkeypatch.setattr(trimmer, "_limit", before - 1)
    trimmer.pytest_runtest_logfinish()
    assert remembered.cache_info().currsize == 0
    assert usage.anonymous_bytes(usage.os.getpid()) <= before - SIZE


def test_peak_has_the_memory_of_children() -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in usage.descendants(usage.os.getpid())
        assert usage.anonymous_bytes(child.pid) > SIZE
        sampler = usage.Sampler()
        sampler.look()
        assert sampler.peak > sampler.largest > SIZE
        child.communicate(b"\n")
    assert usage.anonymous_bytes(child.pid) == 0
