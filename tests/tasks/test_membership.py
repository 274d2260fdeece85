# SPDX-License-Identifier: LGPL-2.1-or-later

"""Threads are selected by control group, container and namespace."""

import pytest

from msatools.tasks.identity import container_ids, container_path, is_below

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
