# SPDX-License-Identifier: LGPL-2.1-or-later

"""Run a process and see what it takes."""

import os
import subprocess
from collections.abc import Sequence


def run_process(command: Sequence[object], text: str = "") -> int:
    """Run a command and give its peak memory in KiB."""
    with subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(text)
        process.stdin.close()
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} failed:\n{output[-2000:]}")
    return usage.ru_maxrss
