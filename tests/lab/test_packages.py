# SPDX-License-Identifier: LGPL-2.1-or-later
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fixtures.lab.cache import Cache
from fixtures.lab.packages import (
    Apt,
    Archive,
    Package,
    parse_depends,
    parse_simulation,
    parse_versions,
)

DEPENDS = """\
linux-image-6.12-cloud-amd64
  Depends: linux-image-6.12.117+deb12-cloud-amd64
  PreDepends: libc6
 |Depends: linux-base
  Depends: <linux-initramfs-tool>
  Suggests: linux-doc
"""

POLICY = """\
linux-image-6.1.0-56-cloud-amd64:
  Installed: (none)
  Candidate: 6.1.192-2
  Version table:
     6.1.192-2 500
        500 http://archive.invalid/debian bookworm/main amd64 Packages
zlib1g:
  Installed: 1:1.2.13.dfsg-1
  Candidate: 1:1.2.13.dfsg-1
gone:
  Installed: (none)
  Candidate: (none)
"""

SIMULATION = """\
NOTE: This is only a simulation!
Inst libc6 (2.36-9+deb12u14 Debian:12.15/oldstable [amd64]) []
Inst zlib1g [1:1.2.12] (1:1.2.13.dfsg-1 Debian:12.15/oldstable [amd64])
Conf libc6 (2.36-9+deb12u14 Debian:12.15/oldstable [amd64])
"""


def test_depends_by_name_and_not_virtual() -> None:
    assert parse_depends(DEPENDS) == [
        "linux-image-6.12.117+deb12-cloud-amd64",
        "libc6",
        "linux-base",
    ]
    assert parse_depends("") == []


def test_candidate_versions() -> None:
    assert parse_versions(POLICY) == {
        "linux-image-6.1.0-56-cloud-amd64": "6.1.192-2",
        "zlib1g": "1:1.2.13.dfsg-1",
    }


def test_packages_of_a_simulated_install() -> None:
    assert parse_simulation(SIMULATION) == [
        Package("libc6", "2.36-9+deb12u14"),
        Package("zlib1g", "1:1.2.13.dfsg-1"),
    ]
    assert str(Package("zlib1g", "1:1.2.13")) == "zlib1g=1:1.2.13"


@dataclass(frozen=True)
class FakeApt(Apt):
    """One that fetches files which say for what architecture they are."""

    root: Path
    of: str

    @property
    def lists(self) -> Path:
        return self.root

    @property
    def arch(self) -> str:
        return self.of

    def run(
        self, command: Sequence[str], timeout: float, cwd: Path | None = None
    ) -> str:
        assert cwd
        (cwd / "busybox.deb").write_text(self.of)
        return ""


def test_packages_of_other_architectures_are_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "a_Packages").touch()
    cache, packages = Cache(tmp_path / "cache", 1 << 20), [Package("busybox", "1")]
    for arch in ("", "arm64", ""):
        archive = Archive(cache, FakeApt(tmp_path, arch))
        (deb,) = archive.download("userland", packages)
        assert deb.read_text() == arch
