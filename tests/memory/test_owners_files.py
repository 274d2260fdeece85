# SPDX-License-Identifier: LGPL-2.1-or-later

"""Page cache by file and file system agrees with mincore(2) of each file."""

import pytest
from drgn import Program

from fixtures import lab
from msatools.memory import breakdowns, by_file
from msatools.memory import by_file as byfile
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import FileGroup, FileSystemGroup, MemstatReport
from tests.support.prompt import printed

from . import ownertruth
from .sums import check_of, view
from .truth import cached_pages

Files = dict[str, FileGroup]


def listed(report: MemstatReport) -> list[FileGroup]:
    groups = view(report, "file")
    return [g for g in groups if isinstance(g, FileGroup) and g.kind]


@pytest.fixture(scope="module")
def files(owners_report: MemstatReport) -> Files:
    """Files by name; names are unique."""
    found = listed(owners_report)
    assert len({group.name for group in found}) == len(found) > 20
    return {group.name: group for group in found}


@pytest.fixture(scope="module")
def systems(owners_report: MemstatReport) -> dict[str, FileSystemGroup]:
    groups = view(owners_report, "fs")
    found = [g for g in groups if isinstance(g, FileSystemGroup) and g.fstype]
    return {group.name: group for group in found}


def test_files_that_only_descriptors_hold(owners_run: lab.Run, files: Files) -> None:
    held = ownertruth.open_file_pages(owners_run, "reader")
    deleted = files["/mnt/data/deleted (deleted)"]
    assert deleted.deleted
    assert deleted.pages == held.pop("deleted") == 3 * 256
    for name, pages in held.items():
        file = files[f"/mnt/data/{name}"]
        assert (file.pages, file.deleted) == (pages, False)
        assert file.kind == "file"
        assert (file.mount, file.fstype) == ("/mnt/data", "ext4")
    assert held["holes"] >= 2 * 256 > 0


def test_size_and_device_of_files(owners_run: lab.Run, files: Files) -> None:
    device = owners_run.workload["disks"]["data"].rpartition("/")[2]
    for name, size in owners_run.workload["sizes"].items():
        suffix = " (deleted)" if name == "deleted" else ""
        file = files[f"/mnt/data/{name}{suffix}"]
        assert (file.size_bytes, file.device) == (size, device)
        assert file.path == file.name
    assert files["/mnt/data/holes"].size_bytes == 32 << 20


def test_shared_memory(owners_run: lab.Run, files: Files) -> None:
    held = ownertruth.open_file_pages(owners_run, "shmem")
    sysv, shared = (
        ownertruth.region_pages(owners_run, name)
        for name in ("sysv", "shared-anonymous")
    )
    expected = {
        "/mnt/tmpfs/tmpfs": ("tmpfs", held["tmpfs"]),
        "/mnt/tmpfs/tmpfs-deleted (deleted)": ("tmpfs", held["tmpfs-deleted"]),
        "/memfd:lab (deleted)": ("memfd", held["memfd"]),
        "/SYSV000001ab (deleted)": ("sysv", sysv),
        "/dev/zero (deleted)": ("shared anonymous", shared),
    }
    found = {name: (files[name].kind, files[name].pages) for name in expected}
    assert found == expected
    assert all(pages >= 2 * 256 for _, pages in expected.values())
    assert files["/mnt/tmpfs/tmpfs-deleted (deleted)"].deleted
    assert files["/mnt/tmpfs/tmpfs"].mount == "/mnt/tmpfs"
    memfd = files["/memfd:lab (deleted)"]
    assert (memfd.mount, memfd.deleted) == (None, False)


def test_block_device_by_its_name(owners_run: lab.Run, files: Files) -> None:
    raw = files[owners_run.workload["disks"]["raw"].rpartition("/")[2]]
    assert raw.kind == "block device"
    assert raw.pages == cached_pages(owners_run, "/dev/lab/raw") >= 3 * 256
    assert raw.classes == {"cache.blockdev": raw.pages}


def test_file_systems_sum_their_files(
    files: Files, systems: dict[str, FileSystemGroup]
) -> None:
    for name in ("/mnt/data", "/mnt/tmpfs", "/"):
        its_files = [file for file in files.values() if file.mount == name]
        system = systems[name]
        assert system.pages == sum(file.pages for file in its_files) > 0
        assert system.files == len(its_files)
        assert system.mounts == (name,)
        assert {file.fstype for file in its_files} == {system.fstype}
    disks = [file for file in files.values() if file.kind == "block device"]
    assert systems["block devices"].pages == sum(file.pages for file in disks)


def test_too_many_files(
    monkeypatch: pytest.MonkeyPatch, owners_prog: Program, owners_report: MemstatReport
) -> None:
    """The largest files are listed, the very largest with paths; all are counted."""
    monkeypatch.setattr(byfile, "MAX_FILES", 12)
    monkeypatch.setattr(by_file, "MAX_PATHS", 4)
    report = collect_memstat(owners_prog, by=("file",))
    paths = [file.path is not None for file in listed(report)]
    assert paths == [True] * 4 + [False] * 8
    assert "paths-not-told" in {note.code for note in report.notes}
    before = {group.key: group.pages for group in view(owners_report, "file")}
    after = {group.key: group.pages for group in view(report, "file")}
    (rest,) = (group for group in view(report, "file") if group.key == "-rest")
    assert rest.name == f"{len(before) - len(after) + 1} smaller files"
    gone = before.keys() - after.keys()
    assert rest.pages == sum(before[key] for key in gone) > 0


@pytest.mark.parametrize("kind", ["file", "fs"])
def test_more_files_than_are_counted_separately(
    monkeypatch: pytest.MonkeyPatch, owners_prog: Program, kind: str
) -> None:
    monkeypatch.setattr(breakdowns, "_MOST_OWNERS", 16)
    report = collect_memstat(owners_prog, by=(kind,))
    groups = view(report, kind)
    assert sum(group.pages for group in groups) == report.pages
    (rest,) = (group for group in groups if group.key == "-rest")
    assert rest.name == "smaller files"
    assert rest.pages > 0
    assert report.coverage["names_unreadable"] == 0


def test_swap_cache_has_a_group_of_its_own(by_owner: MemstatReport) -> None:
    """It includes shared memory: a page in the swap cache has no file."""
    for kind in ("file", "fs"):
        (group,) = (g for g in view(by_owner, kind) if g.key == "-swap")
        assert group.pages == check_of(by_owner, "swapcache").walk_pages
        assert set(group.classes) == {"user.anon", "cache.shmem"}


def test_pages_of_hugetlb_have_a_file(run: lab.Run, by_owner: MemstatReport) -> None:
    found = sum(file.pages for file in listed(by_owner) if file.kind == "hugetlbfs")
    assert found == ownertruth.region_pages(run, "hugetlb-shared")


def test_names_are_escaped(owners_prog: Program) -> None:
    text = printed(owners_prog, "memstat", "--by", "file", "-n", 50)
    assert "/mnt/data/od\\x1bd\\x0aname" in text
    assert "\x1b" not in text
