# SPDX-License-Identifier: LGPL-2.1-or-later

"""The order of a dump and what is asked about it."""

from pathlib import Path

import pytest

from msatools.cli.options import UsageError, parse_words


def test_dump_goes_first(tmp_path: Path) -> None:
    dump = tmp_path / "vmcore"
    dump.touch()
    with pytest.raises(UsageError, match=r"name the dump first, then jiffies$"):
        parse_words(["jiffies", str(dump)])


def test_two_dumps(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="a second target, after"):
        parse_words([str(tmp_path / "one"), str(tmp_path / "two")])
