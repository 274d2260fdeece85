# SPDX-License-Identifier: LGPL-2.1-or-later

"""How fast the kernel is looked for in a guest's memory, beside reading the file."""

import os
import tempfile
from pathlib import Path

import numpy as np

from msatools.program.raw_memory import FileMemory, find_kernels
from tests.bench.timing import beside, medians

_DATA_BYTES = 1 << 30
_SPARSE_BYTES = 256 << 30
_BLOCK = 1 << 20
_PIECES = 64
"""Parts of the data in the sparse file, far from each other."""

_GIB = 1 << 30


def compare(rounds: int, folder: str | None = None) -> None:
    """Time both in turn on files in the page cache, and print speeds and ratios.

    :param folder: A folder on a file system with holes, and 2 GiB of room.
    """
    with tempfile.TemporaryDirectory(dir=folder) as made:
        whole, sparse = Path(made, "whole"), Path(made, "sparse")
        block = np.random.default_rng(1).bytes(_BLOCK)
        with whole.open("wb") as one, sparse.open("wb") as other:
            for start in range(0, _DATA_BYTES, _BLOCK):
                one.write(block)
                piece, rest = divmod(start, _DATA_BYTES // _PIECES)
                other.seek(piece * (_SPARSE_BYTES // _PIECES) + rest)
                other.write(block)
            other.truncate(_SPARSE_BYTES)
        seconds = medians(
            {
                "read alone, 1 GiB": (lambda: _read(whole), 1),
                "searched, 1 GiB": (lambda: _search(whole), 1),
                "searched, 1 GiB of 256, sparse": (lambda: _search(sparse), 1),
            },
            rounds,
        )
    beside(
        "the search for a kernel in 1 GiB",
        "reading the file alone",
        seconds["searched, 1 GiB"],
        seconds["read alone, 1 GiB"],
    )
    print(f"KERNEL looked for, in the page cache, {rounds} rounds, medians of CPU time")
    print(f"{'FILE':32}{'time':>8}{'rate':>13}{'16 GiB':>9}")
    for name, each in seconds.items():
        rate = _DATA_BYTES / _GIB / each
        print(f"{name:32}{each:6.2f} s{rate:7.2f} GiB/s{16 / rate:7.1f} s")


def _read(path: Path) -> None:
    """Read a file, into one buffer."""
    buffer = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while os.readv(file.fileno(), [buffer]):
            pass


def _search(path: Path) -> None:
    assert not find_kernels(FileMemory("raw memory", str(path), is_packed=True))


if __name__ == "__main__":
    compare(5)
