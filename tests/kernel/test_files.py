# SPDX-License-Identifier: LGPL-2.1-or-later

"""Open files of tasks and their paths are those that drgn's helpers find."""

import os

import numpy as np
import pytest
from drgn import Object, Program
from drgn.helpers.linux.fs import d_path, for_each_file
from drgn.helpers.linux.pid import find_task

from fixtures import lab
from msatools.kernel.files import Descriptors, Paths
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from tests.support.dumps import BUSY, open_dump

NAMED = ("poll", "tty-read", "pipe-mutex", "file-read", "mq-send", "freezer", "execute")


@pytest.fixture(scope="module", params=BUSY)
def dump(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def prog(dump: str) -> Program:
    return open_dump(dump, "btf")


@pytest.fixture
def tasks(dump: str, prog: Program) -> list[Object]:
    named = lab.build(dump).workload["tasks"]
    return [find_task(prog, named[name]["tid"]) for name in NAMED]


def test_every_descriptor(prog: Program, tasks: list[Object]) -> None:
    descriptors = Descriptors(Reader(prog), LossLog())
    addresses = np.array([task.value_() for task in tasks], np.uint64)
    tables = descriptors.tables(addresses)
    compared = 0
    for row, task in enumerate(tasks):
        known = {fd: file.value_() for fd, file in for_each_file(task)}
        whole = descriptors.all_files(tables, row)
        assert {n: int(whole[n]) for n in np.flatnonzero(whole).tolist()} == known
        compared += len(known)
    assert compared > 100
    for fd in (0, 1, 18):
        files = descriptors.lookup(tables, np.full(len(tasks), fd))
        open_files = [dict(for_each_file(task)).get(fd) for task in tasks]
        assert files.tolist() == [file.value_() if file else 0 for file in open_files]


def test_what_is_not_open(prog: Program, tasks: list[Object]) -> None:
    losses = LossLog()
    descriptors = Descriptors(Reader(prog), losses)
    addresses = np.array([tasks[0].value_(), 0], np.uint64)
    tables = descriptors.tables(addresses)
    for fd in (-1, 200, 1 << 30):
        assert not descriptors.lookup(tables, np.full(2, fd)).any()
    assert not descriptors.all_files(tables, 1).size
    assert not losses.lost


def test_paths_of_all_files(prog: Program, tasks: list[Object]) -> None:
    """Paths of named files are those that d_path() returns."""
    losses = LossLog()
    reader = Reader(prog)
    paths = Paths(reader, losses)
    files = {file.value_(): file for task in tasks for _, file in for_each_file(task)}
    read = Descriptors(reader, losses).read_files(np.array(list(files), np.uint64))
    places = [
        (int(mount), int(dentry))
        for mount, dentry in zip(read["mount"], read["dentry"], strict=True)
    ]
    named, bare = 0, 0
    for path, file in zip(paths.tell(places), files.values(), strict=True):
        assert path is not None
        if path.startswith("/"):
            plain = path.removesuffix(" (deleted)")
            assert plain == os.fsdecode(d_path(file.f_path)).removesuffix(" (deleted)")
            named += 1
        else:
            # A pipe or socket has only a dentry name.
            assert path == file.f_path.dentry.d_name.name.string_().decode()
            bare += 1
    assert named > 15
    assert bare > 10
    assert not losses.lost


def test_a_path_that_leads_nowhere(prog: Program) -> None:
    losses = LossLog()
    paths = Paths(Reader(prog), losses)
    nowhere = 0xFFFF_FFFF_FFFF_0000
    assert paths.tell([(0, 0), (nowhere, nowhere)]) == [None, None]
    assert losses.lost["dentry_unreadable"] == 1


def test_a_mount_of_a_file_system(prog: Program, tasks: list[Object]) -> None:
    paths = Paths(Reader(prog), LossLog())
    by_name = dict(zip(NAMED, tasks, strict=True))
    frozen = next(
        file.f_inode.i_sb
        for _, file in for_each_file(by_name["freezer"])
        if d_path(file.f_path) == b"/mnt/frozen"
    )
    mount = paths.mount_of(frozen.value_())
    assert paths.tell([(mount, frozen.s_root.value_())]) == ["/mnt/frozen"]
    assert paths.mount_of(0) == 0
