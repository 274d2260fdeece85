# SPDX-License-Identifier: LGPL-2.1-or-later

"""The reproducers for libkdumpfile do what their table says."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.calls import CORE

GUIDE = (Path(__file__).parents[2] / "docs/libkdumpfile.md").read_text()
OUTCOMES = {
    "the page is read": (0, "other data\n"),
    "it reads as zeros, without an error": (0, "zeros\n"),
    "SIGBUS": (-signal.SIGBUS, ""),
    "SIGBUS when the file is opened": (-signal.SIGBUS, ""),
}
ROWS = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", GUIDE, re.MULTILINE)


@pytest.mark.parametrize(("case", "outcome"), ROWS)
def test_outcome(case: str, outcome: str, tmp_path: Path) -> None:
    """If it is another one, libkdumpfile was mended: the guard can go."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    script = tmp_path / "reproduce.py"
    script.write_text(code)
    ran = subprocess.run(
        [sys.executable, str(script), case, CORE, str(tmp_path / "copy")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == OUTCOMES[outcome]
