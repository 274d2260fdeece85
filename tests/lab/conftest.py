# SPDX-License-Identifier: LGPL-2.1-or-later

"""Programs of the guests, compiled and run here."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.lab.cache import Cache


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """A cache of this run, where programs are compiled anew."""
    return Cache(tmp_path_factory.mktemp("cache"), 1 << 30)


@pytest.fixture
def spawn() -> Iterator[Any]:
    """Start programs, which are killed in the end with all that they have started."""
    started: list[subprocess.Popen[Any]] = []

    def run(*words: str | Path, **options: Any) -> subprocess.Popen[Any]:
        started.append(subprocess.Popen(words, start_new_session=True, **options))
        return started[-1]

    yield run
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
