# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads of a file are counted under the marker before them."""

import sys
from pathlib import Path

import pytest

from tests.support.strace import MARKER, reads_of

WORK = f"""
import os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
other = os.open(sys.argv[0], os.O_RDONLY)
os.pread(file, 2, 0)
for name in ("first", "second", "none"):
    print("{MARKER}" + name, file=sys.stderr, flush=True)
    if name != "none":
        os.read(file, 1)
        os.preadv(file, [bytearray(2)], 1)
    if name == "second":
        os.pread(file, 1, 0)
    os.read(other, 1)
"""


def test_reads_are_counted(tmp_path: Path) -> None:
    script, data = tmp_path / "work.py", tmp_path / "a file"
    script.write_text(WORK)
    data.write_bytes(bytes(100))
    counts = reads_of([sys.executable, script, data], data)
    assert counts == {"": 1, "first": 2, "second": 3}


def test_command_that_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="badly"):
        reads_of([sys.executable, "-c", "raise SystemExit('badly')"], tmp_path)
