# SPDX-License-Identifier: LGPL-2.1-or-later
import dataclasses
from pathlib import Path

import pytest

from fixtures.lab import kernels, packages
from fixtures.lab.cache import Cache
from fixtures.lab.errors import LabError
from fixtures.lab.kernels import KERNELS, Installed, Kernel, Release, order_releases
from fixtures.lab.packages import Archive

IMAGE = "linux-image-6.1.0-{}-cloud-amd64"
RELEASE = "6.1.0-{}-cloud-amd64"


def versions(*revisions: int) -> dict[str, str]:
    """What the archive has: image and debug package of each revision."""
    found = {}
    for revision in revisions:
        name = IMAGE.format(revision)
        found[name] = found[f"{name}-dbg"] = f"6.1.{revision}-1"
    return found


def order(meta: list[str], found: dict[str, str]) -> list[str]:
    return [r.release for r in order_releases(KERNELS["6.1"], meta, found)]


def test_newest_first_by_number_not_by_letter() -> None:
    newest = [RELEASE.format(n) for n in (100, 56, 9)]
    assert order([], versions(9, 100, 56)) == newest


def test_what_the_meta_package_names_leads() -> None:
    found = versions(55, 56)
    assert order([IMAGE.format(55)], found)[0] == RELEASE.format(55)


def test_release_needs_its_debug_package_at_the_same_version() -> None:
    found = versions(54, 55, 56)
    del found[IMAGE.format(56) + "-dbg"]
    found[IMAGE.format(55)] = "6.1.56-1"
    assert order([IMAGE.format(56)], found) == [RELEASE.format(54)]


@pytest.mark.parametrize(
    "package",
    [
        "linux-image-6.12.117+deb12-cloud-amd64",
        "linux-image-6.1.0-56-amd64",
        "linux-image-6.1.0-56-cloud-amd64-dbg",
        "linux-image-6.1.0-56-cloud-amd64-unsigned",
        "linux-image-cloud-amd64",
    ],
)
def test_other_kernels_packages_are_not_taken(package: str) -> None:
    assert KERNELS["6.1"].release_of(package) is None


@pytest.mark.parametrize(
    "release",
    ["6.12.117+deb12-amd64", "6.12.9+bpo-amd64", "6.12.0-0.deb12-amd64"],
)
def test_generic_flavour_is_the_one_without_a_name(release: str) -> None:
    kernel = KERNELS["6.12generic"]
    assert kernel.release_of(f"linux-image-{release}") == release
    for flavour in ("cloud", "rt"):
        other = release.replace("-amd64", f"-{flavour}-amd64")
        assert kernel.release_of(f"linux-image-{other}") is None


def test_newest_of_a_row_may_be_of_any_minor_version() -> None:
    names = [f"linux-image-7.{n}+deb13-cloud-amd64" for n in ("2.12", "10.1", "3.4")]
    found = dict.fromkeys([*names, *(f"{name}-dbg" for name in names)], "7-1")
    ordered = order_releases(KERNELS["7.x"], [], found)
    assert [r.release.partition("+")[0] for r in ordered] == [
        "7.10.1",
        "7.3.4",
        "7.2.12",
    ]


def test_image_package_may_be_split_in_parts() -> None:
    name = "7.3.4+deb13-cloud-amd64"
    wanted = [f"linux-image-{name}", f"linux-image-{name}-dbg"]
    wanted += [f"linux-{part}-{name}" for part in ("base", "binary", "modules")]
    whole, split = (
        order_releases(KERNELS["7.x"], [], dict.fromkeys(names, "7.3.4-1"))[0]
        for names in (wanted[:2], wanted)
    )
    assert [package.name for package in whole.packages] == wanted[:2]
    assert [package.name for package in split.packages] == wanted
    assert whole.vmlinux == f"usr/lib/debug/boot/vmlinux-{name}"
    assert split.vmlinux == f"usr/lib/debug/lib/modules/{name}/vmlinux"


def test_release_names_its_packages() -> None:
    release = Release("6.12.117+deb12-cloud-amd64", "6.12.117-1~deb12u1")
    assert str(release.image) == (
        "linux-image-6.12.117+deb12-cloud-amd64=6.12.117-1~deb12u1"
    )
    assert release.debug.name == "linux-image-6.12.117+deb12-cloud-amd64-dbg"


class FakeArchive(Archive):
    """An archive that fetches only what is *there*, whatever its lists say."""

    def __init__(self, cache: Cache, listed: list[int], there: list[int]) -> None:
        self.cache = cache
        self.listed = listed
        self.there = [RELEASE.format(n) for n in there]
        self.tried: list[str] = []
        self.fresh: list[int] = []

    def refresh(self) -> bool:
        self.listed = self.fresh or self.listed
        return bool(self.fresh)

    def _state(self) -> str:
        return repr(self.listed)


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeArchive:
    archive = FakeArchive(Cache(tmp_path, 1 << 30), [54, 55, 56], [54, 55, 56])

    def unpack(kernel: Kernel, release: Release, _: Archive) -> Installed:
        archive.tried.append(release.release)
        if release.release not in archive.there:
            raise LabError("404")
        key = kernels._key(release)
        path = archive.cache.entry("kernel", release.release, key, lambda d: None)
        return Installed(kernel, release.release, release.version, path)

    def releases(kernel: Kernel, _: Archive) -> list[Release]:
        found = versions(*archive.listed)
        return order_releases(kernel, [IMAGE.format(max(archive.listed))], found)

    monkeypatch.setattr(kernels, "_unpack", unpack)
    monkeypatch.setattr(kernels, "releases", releases)
    return archive


@pytest.mark.parametrize(
    ("cached", "listed", "renewed", "there", "installed"),
    [
        pytest.param([], [54, 55, 56], [], [54, 55, 56], 56, id="the newest"),
        pytest.param([54], [54, 55, 56], [], [55], 54, id="the cached one"),
        pytest.param([], [54, 55, 56], [], [54, 55], 55, id="the next newest"),
        # Before a cached one comes the newest of lists that were out of date.
        pytest.param([54], [54, 56], [54, 57], [57], 57, id="a renewed one"),
    ],
)
def test_what_is_installed(
    archive: FakeArchive,
    cached: list[int],
    listed: list[int],
    renewed: list[int],
    there: list[int],
    installed: int,
) -> None:
    if cached:
        archive.listed = cached
        kernels.install("6.1", archive)
    archive.listed, archive.fresh = listed, renewed
    archive.there = [RELEASE.format(number) for number in there]
    assert kernels.install("6.1", archive).release == RELEASE.format(installed)


def test_nothing_to_be_had_is_one_clear_error(archive: FakeArchive) -> None:
    archive.there = []
    with pytest.raises(LabError, match=r"no kernel 6\.1 .*debug info"):
        kernels.install("6.1", archive)


def test_what_failed_is_left_alone_until_the_lists_change(
    archive: FakeArchive,
) -> None:
    archive.there = [RELEASE.format(54)]
    for _ in range(2):
        assert kernels.install("6.1", archive).release == RELEASE.format(54)
    assert archive.tried == [RELEASE.format(n) for n in (56, 55, 54)]
    archive.listed = [54, 55, 56, 57]
    archive.there.append(RELEASE.format(57))
    assert kernels.install("6.1", archive).release == RELEASE.format(57)


def test_nothing_newer_than_the_cached_one_is_tried_for_a_while(
    archive: FakeArchive,
) -> None:
    archive.listed = [54]
    kernels.install("6.1", archive)
    archive.listed, archive.there = [54, 55, 56], []
    for _ in range(2):
        assert kernels.install("6.1", archive).release == RELEASE.format(54)
    assert archive.tried == [RELEASE.format(n) for n in (54, 56)]


def test_what_failed_is_tried_again_after_a_while(
    archive: FakeArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.there = [RELEASE.format(55)]
    kernels.install("6.1", archive)
    archive.there.append(RELEASE.format(56))
    assert kernels.install("6.1", archive).release == RELEASE.format(55)
    monkeypatch.setattr(packages, "FORGET_SECONDS", 0)
    assert kernels.install("6.1", archive).release == RELEASE.format(56)


def test_failure_of_all_is_not_remembered(archive: FakeArchive) -> None:
    archive.there = []
    with pytest.raises(LabError):
        kernels.install("6.1", archive)
    archive.there = [RELEASE.format(56)]
    assert kernels.install("6.1", archive).release == RELEASE.format(56)


def test_rows_are_keyed_by_their_name() -> None:
    for name, kernel in KERNELS.items():
        assert kernel.name == name
        kind = "linux-source-" if kernel.configs else "linux-image-"
        assert dataclasses.asdict(kernel)["meta"].startswith(kind)
        assert kernel.arch in kernel.flavour.split("-")
        # What stands for it in a run's name, behind the last dash.
        assert "-" not in name
