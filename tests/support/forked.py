# SPDX-License-Identifier: LGPL-2.1-or-later

"""A program that is a forked copy of the tests' own process.

It has descriptors, signals and an exit status of its own, as one that is started, and
not the second that Python takes to start and to import what commands need.
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
    """Start a copy of this process.

    :param work: What it does, and gives its exit status.
    :param environ: Variables to change.
    :param options: Of :class:`subprocess.Popen`.
    """
    known = _descriptors()

    def run() -> NoReturn:
        # The copy is not to keep the other ends of its own pipes open.
        for descriptor in _descriptors() - known - {0, 1, 2}:
            os.close(descriptor)
        os.environ.update(environ or {})
        _run(work)

    # What is run before a program is executed never ends, so that none is.
    return subprocess.Popen(
        ["/nonexistent"],
        preexec_fn=run,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def _descriptors() -> set[int]:
    # One of them is that of the list itself, and closed by now.
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
