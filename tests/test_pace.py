# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a run is said to have taken of the machine."""

import os
import subprocess
import sys

from msatools.pace import peak_bytes

ASK = "from msatools.pace import peak_bytes; print(peak_bytes())"
MUCH = 256 << 20


def test_peak_is_what_was_resident() -> None:
    before = peak_bytes()
    assert before is not None
    content = b"\1" * (before + MUCH)
    after = peak_bytes()
    assert after is not None
    assert after >= len(content)


def test_peak_is_not_that_of_who_started_us() -> None:
    """Who is copied before another program takes its place, with all its memory."""
    content = b"\1" * MUCH
    words = [sys.executable, "-c", ASK]
    # With it Python copies itself, where it would else start a process beside itself.
    done = subprocess.run(words, preexec_fn=os.getpid, stdout=subprocess.PIPE)
    assert 1 << 20 < int(done.stdout) < len(content)
