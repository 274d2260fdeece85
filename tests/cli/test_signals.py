# SPDX-License-Identifier: LGPL-2.1-or-later

import os
import signal
import time
from collections.abc import Callable

import pytest

from msatools.cli.output import Stopped, stop_on_signals, whole


def kill() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def check_stops(work: Callable[[], None]) -> None:
    """Check that the signal in ``work`` stops it."""
    with stop_on_signals() as came, pytest.raises(Stopped) as stopped:
        work()
    assert came[0] == stopped.value.number == signal.SIGTERM


def test_signal_waits_for_the_end_of_whole() -> None:
    done = []

    def work() -> None:
        with whole():
            kill()
            done.append("whole")
        done.append("after it")

    check_stops(work)
    assert done == ["whole"]


def test_swallowed_signal_stops_all_the_same() -> None:
    class Plugin:
        def __del__(self) -> None:
            # Exceptions raised here are discarded, as in drgn's plugins.
            kill()

    def work() -> None:
        Plugin()
        time.sleep(20)
        pytest.fail("it goes on")

    check_stops(work)


def test_second_signal_does_not_wait() -> None:
    def work() -> None:
        with whole():
            kill()
            kill()
            pytest.fail("it goes on")

    check_stops(work)
    # Later uses work as before.
    with stop_on_signals(), whole():
        pass


def test_signal_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msatools.cli.output._PATIENCE_S", 1.0)

    def work() -> None:
        with whole():
            kill()
            time.sleep(20)

    began = time.monotonic()
    check_stops(work)
    assert 0.9 < time.monotonic() - began < 10
