# SPDX-License-Identifier: LGPL-2.1-or-later

"""Threads are selected by control group, container and namespace."""

from typing import Any

import numpy as np
import pytest

from msatools.tasks.identity import (
    UNKNOWN,
    Membership,
    TaskCgroups,
    TaskNamespaces,
    container_ids,
    container_path,
    is_below,
    members,
)

ID = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
POD = "/kubepods.slice/kubepods-pod1.slice"
CONTAINERS = (
    *(f"/docker/{ID}", f"/system.slice/docker-{ID}.scope", f"/lxc.payload/{ID}"),
    *(f"{POD}/cri-containerd-{ID}.scope", f"{POD}/crio-{ID}", f"{POD}/{ID}"),
    f"/machine.slice/libpod-{ID}.scope",
    f"{POD}/cri-containerd:{ID}",
)


@pytest.mark.parametrize("path", CONTAINERS)
def test_containers(path: str) -> None:
    for below in ("", "/init.scope", "/a/b"):
        assert container_path(path + below) == path
        assert container_ids(path + below) == (ID,)


@pytest.mark.parametrize(
    ("path", "pattern", "expected"),
    [
        ("/a", "/", True),
        ("/", "/", True),
        ("/", "/a", False),
        ("/a/b", "/a", True),
        ("/a", "/a/", True),
        ("/a", "/a/b", False),
        ("/ab", "/a", False),
        ("/a/web-1/x", "/a/web-*", True),
        ("/a/b/web-1", "/a/web-*", False),
        ("/a/b/c", "/*/b", True),
        ("/a/xb", "/a/?b", True),
        ("/a/[x]", "/a/[x]", True),
        ("/a/x", "/a/[xy]", True),
        ("/a/b (deleted)", "/a/b", True),
        ("/a/b (deleted)", "/a/b (deleted)", True),
        ("/a/B", "/a/b", False),
    ],
)
def test_below(path: str, pattern: str, expected: bool) -> None:
    assert is_below(path, pattern) == expected


GROUPS = TaskCgroups(
    ("/", "/a/b", f"/docker/{ID}/x"), np.array([0, 1, 2, UNKNOWN, 1], np.int32)
)
SPACES = TaskNamespaces(
    {"pid": np.array([1, 1, 7, 1, -1]), "net": np.array([2, 3, 3, 2, -1])}
)


@pytest.mark.parametrize(
    ("wanted", "rows"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"cgroups": ("/",)}, [0, 1, 2, 4]),
        ({"cgroups": ("/a", "/docker")}, [1, 2, 4]),
        ({"containers": (ID[:12],)}, [2]),
        ({"containers": (OTHER, ID)}, [2]),
        ({"containers": (ID[1:13],)}, []),
        ({"namespaces": (7,)}, [2]),
        ({"namespaces": (7, 2)}, [0, 2, 3]),
        ({"namespaces": (3,), "cgroups": ("/a",)}, [1]),
        ({"namespaces": (9,)}, []),
    ],
)
def test_members(wanted: dict[str, Any], rows: list[int]) -> None:
    found = members(Membership(**wanted), GROUPS, SPACES)
    assert np.flatnonzero(found).tolist() == rows
