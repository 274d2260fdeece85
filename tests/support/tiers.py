# SPDX-License-Identifier: LGPL-2.1-or-later

"""
A pytest plugin that selects the tests to run.

``make test`` runs tests without dumps, tests of the demo cores, and tests of dumps of
one kernel (``KERNEL``). A test for several kernels has their names in its ID. With
other kernels it runs if it has the marker ``kernels``, because the code differs between
them, and is about a demo core or one of the few dumps in ``OTHERS``; else only with
``--all-kernels``.

``make test-fast`` runs those of them that need no guest and are quick (``--fast``).

``make test-live`` runs tests that need a running guest (marker ``live``): those that
use the fixtures ``live_guest`` or ``live_qmp``, and all in ``tests/live``.
"""

import functools
import re
from typing import NoReturn

import pytest

from fixtures import lab
from fixtures.lab import store
from fixtures.lab.cache import Cache
from fixtures.lab.kernels import KERNELS

from .wide import is_wide

KERNEL = "6.12"
"""The kernel that every test runs on."""

OTHERS = ("memory-6.1",)
"""Dumps of other kernels that ``make test`` has made. Each is a minute of two CPUs, so
that all others are for ``make test-long``."""

_KERNEL_NAME = re.compile(
    rf"([a-z][a-z-]*-)?(?<![\d.])({'|'.join(map(re.escape, KERNELS))})(?![\w.])"
)
_LARGE = ("manytasks", "manyfutexes", "hugememory", "manythreads")
"""Guests with tens of thousands of tasks, or large in another way."""

SLOW = (
    *("tests/fleet/", "tests/fuzz/", "tests/test_bounds", "tests/test_contract"),
    *("tests/test_options", "tests/test_package", "tests/test_twice"),
    *("tests/test_faults", "tests/test_numpy_threads"),
    "tests/cli/test_recording",
    *("tests/derived/test_completions", "tests/docs/test_adding"),
    "tests/lab/test_store",
    *("tests/docs/test_pages", "tests/render/test_widths", "tests/report/test_report"),
    *("tests/selfdesc/test_kallsyms", "tests/test_plugin", "tests/test_records"),
)
"""Modules of some seconds of CPU time each that need no guest."""

_LIVE_FIXTURES = {"live_guest", "live_qmp"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-kernels",
        action="store_true",
        help=f"run tests on every kernel they know, not on {KERNEL} alone",
    )
    parser.addoption(
        "--anew",
        action="store_true",
        help="boot anew each guest in which commands run, though it is cached",
    )
    parser.addoption(
        "--no-lab",
        action="store_true",
        help="skip the tests that need guests, or dumps of them",
    )
    parser.addoption(
        "--fast",
        action="store_true",
        help="--no-lab, and leave out the modules that take long without guests",
    )


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "live: needs a guest that runs; run by `make test-live`",
        "kernels: runs on every kernel it names, as the code branches on them",
        "long: soaks and wide matrices; run by `make test-long`",
    ):
        config.addinivalue_line("markers", line)
    if config.getoption("--fast"):
        config.option.no_lab = True
    if config.getoption("--no-lab"):
        for name in ("build", "live"):
            setattr(lab, name, _no_lab)
    elif "not live" in config.getoption("markexpr"):
        config.pluginmanager.register(_Guard(config), "guard of builds")
    elif config.getoption("--anew"):
        _build_anew()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Mark live tests; deselect tests of kernels that are not to run."""
    chosen, left_out = [], []
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "tests/live/" in item.nodeid or _LIVE_FIXTURES.intersection(fixtures):
            item.add_marker("live")
        if is_wide(item.nodeid):
            item.add_marker("long")
        wanted = config.getoption("--all-kernels") or _is_wanted(item)
        if config.getoption("--fast"):
            wanted = wanted and not item.nodeid.startswith(SLOW)
        (chosen if wanted else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen


def _is_wanted(item: pytest.Item) -> bool:
    named = _KERNEL_NAME.findall(item.name.partition("[")[2])
    others = {f"{name}{kernel}" for name, kernel in named if kernel != KERNEL}
    if not others:
        return True
    dumps = {dump for name in others for dump in _dumps(name)}
    return item.get_closest_marker("kernels") is not None and dumps <= {*OTHERS}


@functools.cache
def _dumps(name: str) -> list[str]:
    """Return the dumps that a name in a test's ID can mean: other words go before."""
    return [dump for dump in lab.scenarios() if name.endswith(dump)]


def _no_lab(name: str, *_: object, **__: object) -> NoReturn:
    pytest.skip(f"needs the lab's {name}, and --no-lab says not to make it")


class _Guard:
    """Fails tests that need a guest without the marker for it."""

    def __init__(self, config: pytest.Config) -> None:
        self._build = lab.build
        self._all_kernels = bool(config.getoption("--all-kernels"))
        self._test: pytest.Item | None = None
        lab.build, lab.live = self.build, self.live

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._test = item

    def build(self, name: str, *cache: Cache) -> lab.Run:
        if name in lab.scenarios():
            if store.runs_inside(name):
                pytest.fail(
                    f"{name} runs commands inside a guest: mark the test `live`"
                )
            if not name.endswith(f"-{KERNEL}") and not self._may_have(name):
                pytest.fail(
                    f"{name} is another kernel's, and its test is not marked `kernels` "
                    "or it is not one that `make test` makes"
                )
            if name.startswith(_LARGE) and not self._is_marked("long"):
                pytest.fail(f"{name} takes minutes to build: mark the test `long`")
        return self._build(name, *cache)

    def live(self, name: str) -> NoReturn:
        pytest.fail(f"{name} is to run: mark the test `live`")

    def _may_have(self, name: str) -> bool:
        return self._all_kernels or (name in OTHERS and self._is_marked("kernels"))

    def _is_marked(self, marker: str) -> bool:
        test = self._test
        return test is None or test.get_closest_marker(marker) is not None


def _build_anew() -> None:
    """Rebuild each guest in which commands run when it is first requested."""
    build = lab.build
    renewed: set[str] = set()

    def anew(name: str, *cache: Cache) -> lab.Run:
        if store.runs_inside(name) and name not in renewed:
            renewed.add(name)
            store.forget(name, *cache)
        return build(name, *cache)

    lab.build = anew
