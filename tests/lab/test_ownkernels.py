# SPDX-License-Identifier: LGPL-2.1-or-later

"""Kernels of our own build, as far as that goes without building one."""

import re
from pathlib import Path

import pytest

from fixtures.lab import image, ownkernels
from fixtures.lab.cache import Cache
from fixtures.lab.errors import LabError
from fixtures.lab.kernels import KERNELS
from fixtures.lab.packages import Archive, Package

OWN = {name: row for name, row in KERNELS.items() if row.configs}
CONFIGURED = """\
# CONFIG_NUMA is not set
CONFIG_SWAP=y
CONFIG_LOCALVERSION="-lab"
"""


class FakeArchive(Archive):
    """An archive with one source package, which cannot be fetched."""

    def __init__(self, cache: Cache, version: str) -> None:
        self.cache = cache
        self.version = version

    def versions(self, names: list[str]) -> dict[str, str]:  # type: ignore[override]
        return dict.fromkeys(names, self.version) if self.version else {}

    def download(self, label: str, packages: list[Package]) -> list[Path]:  # type: ignore[override]
        raise LabError(f"not there: {packages[0]}")


@pytest.mark.parametrize(
    ("wanted", "lacking"),
    [
        ("CONFIG_SWAP=y\n# A comment\n\n", []),
        ("CONFIG_SWAP=m\n", ["CONFIG_SWAP=m"]),
        ("CONFIG_KASAN=y\n", ["CONFIG_KASAN=y"]),
        ("# CONFIG_NUMA is not set\n", []),
        # Nothing that it depends on is on.
        ("# CONFIG_MEMCG is not set\n", []),
        ("# CONFIG_SWAP is not set\n", ["# CONFIG_SWAP is not set"]),
        ('CONFIG_LOCALVERSION="-lab"\n', []),
    ],
)
def test_options_that_the_kernel_refuses(wanted: str, lacking: list[str]) -> None:
    assert ownkernels.refused(wanted, CONFIGURED) == lacking


@pytest.mark.parametrize("name", OWN)
def test_each_option_is_set_once(name: str) -> None:
    texts = [(ownkernels.CONFIG / file).read_text() for file in OWN[name].configs]
    names = re.findall(r"^(?:# )?(CONFIG_\w+)(?:=| is)", "".join(texts), re.MULTILINE)
    assert len(names) > 100
    assert sorted({*names}) == sorted(names)


@pytest.mark.parametrize("name", OWN)
def test_a_cached_kernel_is_not_built_again(name: str, tmp_path: Path) -> None:
    archive = FakeArchive(Cache(tmp_path, 1 << 30), "6.12.9-1")
    with pytest.raises(LabError, match=r"not there: linux-source-6\.12=6\.12\.9-1"):
        ownkernels.install(OWN[name], archive)
    key = ownkernels.key_of(OWN[name], Package(OWN[name].meta, "6.12.9-1"))

    def fill(directory: Path) -> None:
        (directory / ownkernels.RELEASE).write_text("6.12.9-lab\n")

    archive.cache.entry("kernel", f"{name}-own", key, fill)
    installed = ownkernels.install(OWN[name], archive)
    assert installed.release == "6.12.9-lab"
    # Images and runs are keyed by it.
    assert installed.version == f"6.12.9-1+{key}"


def test_no_source_is_one_clear_error(tmp_path: Path) -> None:
    archive = FakeArchive(Cache(tmp_path, 1 << 30), "")
    with pytest.raises(LabError, match=r"no package linux-source-6\.12 .*apt-get"):
        ownkernels.install(OWN["6.12debug"], archive)


def test_what_was_built_is_collected(tmp_path: Path) -> None:
    """From a tree that has what make leaves, with a make that installs nothing."""
    top = tmp_path / "linux"
    for name in ("include/config/kernel.release", "vmlinux", "arch/x86/boot/bzImage"):
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("6.12.9-lab\n")
    (top / "Makefile").write_text(
        "modules_install:\n"
        "\tmkdir -p $(INSTALL_MOD_PATH)/lib/modules/6.12.9-lab\n"
        "\ttouch $(INSTALL_MOD_PATH)/lib/modules/6.12.9-lab/modules.builtin\n"
    )
    into = tmp_path / "entry"
    into.mkdir()
    ownkernels.collect(top, into)
    found = {str(path.relative_to(into)) for path in into.rglob("*") if path.is_file()}
    assert found == {"release", "vmlinux", "vmlinuz", "modules/modules.builtin"}


def test_guests_without_memcg_do_without_it(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1 << 30)
    made = image.Image(files=image.guest_files("memory"))
    assert ownkernels.image(made, OWN["6.12debug"], cache) == made
    less = ownkernels.image(made, OWN["6.12small"], cache)
    assert less.files.keys() == made.files.keys()
    texts = {name: path.read_text() for name, path in less.files.items()}
    assert not [name for name, text in texts.items() if "+memory" in text]
    changed = {name for name in texts if less.files[name] != made.files[name]}
    assert {Path(name).name for name in changed} == {"lab.py", "memory.py"}
    for name in changed:
        compile(texts[name], name, "exec")
