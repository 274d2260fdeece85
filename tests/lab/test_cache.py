# SPDX-License-Identifier: LGPL-2.1-or-later
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from fixtures.lab.cache import Cache, content_key
from fixtures.lab.errors import LabError

MIB = 1 << 20
HANGS = 300
"""Seconds after which a process is taken for one that will never end."""


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path, limit=1 << 40)


def filled(cache: Cache, name: str, size: int, age: float = 0) -> Path:
    """An entry of *size* bytes, last used *age* seconds ago, held by nobody."""

    def fill(directory: Path) -> None:
        (directory / "data").write_bytes(b"x" * size)

    entry = cache.entry("run", name, "k", fill)
    cache.release()
    os.utime(entry, (time.time() - age,) * 2)
    return entry


def test_key_tells_parts_files_and_their_order_apart(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1")
    two.write_text("2")
    keys = [
        content_key(["a", "b"]),
        content_key(["ab"]),
        content_key(["b", "a"]),
        content_key(["a", "b"], [one]),
        content_key(["a", "b"], [one, two]),
    ]
    assert len(set(keys)) == len(keys)
    assert content_key(["a", "b"], [two, one]) == keys[-1]
    two.write_text("3")
    assert content_key(["a", "b"], [one, two]) != keys[-1]


def test_failed_fill_leaves_nothing(cache: Cache) -> None:
    def fill(directory: Path) -> None:
        (directory / "half").write_text("half")
        raise LabError("no")

    with pytest.raises(LabError):
        cache.entry("run", "name", "key", fill)
    assert cache.entries() == []
    assert list((cache.root / "tmp").iterdir()) == []
    cache.entry("run", "name", "key", lambda directory: None)


def test_second_builder_waits_for_the_first(cache: Cache) -> None:
    def fill(directory: Path) -> None:
        with (cache.root / "fills").open("a") as fills:
            fills.write("x")
        time.sleep(0.3)  # so that the others come meanwhile, on most machines

    context = multiprocessing.get_context("fork")
    all_have_it = context.Barrier(3)

    def build() -> None:
        user = Cache(cache.root, cache.limit)
        user.entry("run", "name", "key", fill)
        all_have_it.wait(HANGS)

    builders = [context.Process(target=build) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(HANGS)
        assert builder.exitcode == 0
    assert (cache.root / "fills").read_text() == "x"


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        (True, True, True),
        (True, False, True),
        (False, True, True),
        (False, False, False),
    ],
)
def test_turns(cache: Cache, first: bool, second: bool, waits: bool) -> None:
    entered = threading.Event()

    def other() -> None:
        with cache.turn("guests", alone=second):
            entered.set()

    thread = threading.Thread(target=other)
    with cache.turn("guests", alone=first):
        thread.start()
        # Long enough for the other one, on most machines, if it need not wait.
        assert entered.wait(0.3 if waits else HANGS) != waits
    assert entered.wait(HANGS)
    thread.join()


def test_least_recently_used_go_first(cache: Cache) -> None:
    old, new, newer = (
        filled(cache, name, MIB, age)
        for name, age in (("old", 300), ("new", 200), ("newer", 100))
    )
    assert cache.evict(int(2.5 * MIB)) == [old]
    assert cache.find("run", "new", "k") == new  # used: now the newest
    cache.release()
    assert cache.evict(int(1.5 * MIB)) == [newer]


def test_what_is_in_use_stays(cache: Cache) -> None:
    entry = filled(cache, "name", MIB)
    other = Cache(cache.root, cache.limit)
    other.find("run", "name", "k")
    assert cache.evict(0) == []
    other.release()
    cache.find("run", "name", "k")
    assert cache.evict(0) == []  # in use by this very process
    cache.release()
    assert cache.evict(0) == [entry]
    assert not entry.exists()
