# SPDX-License-Identifier: LGPL-2.1-or-later

"""
A pytest plugin that bounds the memory of the tests' processes and prints its peak.

Dumps that tests open stay open in functions decorated with ``functools.cache``. Once a
process has grown beyond ``TRIM_BYTES``, these are emptied after the test.
"""

import ctypes
import gc
import os
import sys
import threading
from pathlib import Path

import pytest

TRIM_BYTES = 600 << 20
"""Anonymous memory of a process beyond which it drops what tests have cached."""

ROOM_BYTES = 300 << 20
"""Least growth from one emptying of the caches to the next."""

SAMPLE_SECONDS = 1.0

_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_GIB = 1 << 30


class Trimmer:
    """Empties the caches of test modules when the process has become large."""

    def __init__(self) -> None:
        self._limit = TRIM_BYTES

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        if anonymous_bytes(os.getpid()) > self._limit:
            empty_caches()
            kept = anonymous_bytes(os.getpid())
            self._limit = max(TRIM_BYTES, kept + ROOM_BYTES)


def free_programs() -> None:
    """Free the programs of earlier tests, which may hold a guest's only connection.

    Objects of drgn are no containers for Python: what they hold becomes garbage only
    when a round before has freed them.
    """
    while gc.collect():
        pass


def empty_caches() -> None:
    """Empty all caches of functions in the tests' modules, and free their memory."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("tests."):
            for value in [*vars(module).values()]:
                if clear := getattr(value, "cache_clear", None):
                    clear()
    free_programs()
    # Freed memory that is not at the heap's end stays with the process otherwise.
    ctypes.CDLL(None).malloc_trim(0)


class Sampler(threading.Thread):
    """Samples the memory of this process and its descendants until stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self.peak = 0
        """The largest sum of anonymous memory in bytes."""

        self.largest = 0
        """The most anonymous memory that a process of tests had."""

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.look()

    def look(self) -> None:
        """Take a sample."""
        own = os.getpid()
        parents = descendants(own)
        found = {pid: anonymous_bytes(pid) for pid in parents}
        self.peak = max(self.peak, sum(found.values()))
        # The children of the first process are those that run tests.
        tests = (found[pid] for pid in found if own in (pid, parents[pid]))
        self.largest = max(self.largest, *tests)

    def stop(self) -> None:
        self._ended.set()
        self.join()


class Usage:
    """Prints the peak of the whole run, and of the largest process of tests."""

    def __init__(self) -> None:
        self._sampler = Sampler()
        self._sampler.start()

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        self._sampler.stop()
        self._sampler.look()
        terminalreporter.section("memory")
        terminalreporter.write_line(
            f"{self._sampler.peak / _GIB:5.2f} GiB at most, with guests; the largest "
            f"process of tests had {self._sampler.largest / _GIB:.2f} GiB"
        )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Trimmer(), "trimmer")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Usage(), "usage")


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process without pages of files; 0 if it has ended.

    ``shared`` in statm is the pages of files and of shared memory (proc(5)).
    """
    try:
        words = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(words[1]) - int(words[2])) * _PAGE_BYTES


def descendants(pid: int) -> dict[int, int]:
    """Map a process, and all below it that are alive, to their parents."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            # The name before it may have spaces and parentheses.
            rest = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(rest[1]), []).append(int(path.name))
    found = {pid: 0}
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        for child in children.get(parent, ()):
            found[child] = parent
            waiting.append(child)
    return found
