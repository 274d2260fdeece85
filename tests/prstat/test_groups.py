# SPDX-License-Identifier: LGPL-2.1-or-later

"""Processes summed up by user, and by control group or container."""

import pytest

from msatools.prstat.groups import by_cgroup, by_user, container
from msatools.prstat.model import Group
from tests.prstat.maderows import LIFE, MIB, SECOND, MadeThreads

ID = "0123456789abcdef" * 4
POD = "/kubepods.slice/kubepods-pod1.slice"
CONTAINERS = (
    *(f"/docker/{ID}", f"/system.slice/docker-{ID}.scope", f"/lxc.payload/{ID}"),
    *(f"{POD}/cri-containerd-{ID}.scope", f"{POD}/crio-{ID}", f"{POD}/{ID}"),
    f"/machine.slice/libpod-{ID}.scope",
    f"{POD}/cri-containerd:{ID}",
)


@pytest.mark.parametrize("path", CONTAINERS)
def test_containers(path: str) -> None:
    assert container(path) == path
    assert container(f"{path}/init.scope") == path
    assert container(f"{path}/a/b") == path


OTHERS = (
    *("/", "/user.slice/user-0.slice/session-1.scope", f"/a{ID}", f"/{ID}a"),
    *(f"/{ID[:-1]}", f"/{ID.upper()}", f"/{ID}0"),
)


@pytest.mark.parametrize("path", OTHERS)
def test_what_is_no_container(path: str) -> None:
    assert container(f"{path}/b") == f"{path}/b"


PROCESSES = (
    {"pid": 1, "uid": 0, "user_ns": SECOND, "rss_bytes": MIB},
    {"pid": 2, "uid": 5, "threads": 2, "system_ns": 3 * SECOND},
    {"pid": 3, "tgid": 2, "uid": 5, "threads": 2, "user_ns": SECOND},
    {"pid": 4, "uid": 0, "mm_known": False},
    {"pid": 5, "uid": -1, "lifetime_ns": 0},
)


def test_users() -> None:
    """Largest share of a CPU first, then the largest in memory."""
    found = by_user(MadeThreads(*PROCESSES).by_process())
    assert found == (
        Group("5", 1, 2, 8 * MIB, 4 * MIB, 4 * SECOND, 4 * SECOND / LIFE),
        Group("0", 2, 2, 8 * MIB, MIB, SECOND, SECOND / LIFE),
        Group("-", 1, 1, 8 * MIB, 4 * MIB, 0, 0.0),
    )


def test_users_of_threads() -> None:
    """Memory is a process's, once, however many rows it has."""
    made = MadeThreads(*PROCESSES)
    assert by_user(made.by_thread()) == by_user(made.by_process())


def test_threads_whose_leader_is_dead_or_left_out() -> None:
    dead = {"has_mm": False, "size_bytes": 0, "rss_bytes": 0, "threads": 2}
    rows = MadeThreads({"pid": 2, **dead}, {"pid": 3, "tgid": 2}).by_thread()
    for some, threads in ((rows, 2), (rows[1:], 1)):
        (group,) = by_user(some)
        found = group.processes, group.threads, group.size_bytes
        assert found == (1, threads, 8 * MIB)


def test_control_groups() -> None:
    paths = ("/", f"/docker/{ID}/a", f"/docker/{ID}/b", "/user")
    threads = [{"pid": n, "cgroup": at} for n, at in enumerate((0, 1, 2, 2, 3, -1), 1)]
    found = by_cgroup(MadeThreads(*threads, paths=paths).by_process())
    counts = {group.key: group.processes for group in found}
    assert counts == {"/": 1, f"/docker/{ID}": 3, "/user": 1, "-": 1}


def test_nobody() -> None:
    rows = MadeThreads().by_process()
    assert by_user(rows) == by_cgroup(rows) == ()
