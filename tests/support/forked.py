# SPDX-License-Identifier: LGPL-2.1-or-later

"""Run a function in a fork of the test process.

The fork has its own descriptors, signals and exit status, like a program, but need not
spend a second on starting Python and importing the commands.
"""

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def forked(
    work: Callable[[], int],
    *,
    environ: dict[str, str] | None = None,
    **options: object,
) -> "subprocess.Popen[str]":
    """Start a fork of this process.

    :param work: Function to run in it; returns the exit status.
    :param environ: Environment variables to change.
    :param options: Passed to :class:`subprocess.Popen`.
    """
    known = _descriptors()

    def run() -> NoReturn:
        # The fork must not keep the other ends of its own pipes open.
        for descriptor in _descriptors() - known - {0, 1, 2}:
            os.close(descriptor)
        os.environ.update(environ or {})
        _run(work)

    # preexec_fn never returns, so no program is executed.
    return subprocess.Popen(
        ["/nonexistent"],
        preexec_fn=run,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def _descriptors() -> set[int]:
    # One of them belonged to the listing itself and is closed now.
    listed = {int(name) for name in os.listdir("/proc/self/fd")}
    return {descriptor for descriptor in listed if _is_open(descriptor)}


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _run(work: Callable[[], int]) -> NoReturn:
    status = 99
    try:
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        status = work()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
