# SPDX-License-Identifier: LGPL-2.1-or-later

"""The Debian package: ``make test-dist``. What it contains is fetched from PyPI."""

import os
import re
import subprocess
from pathlib import Path

import pytest

import msatools
from msatools.derived.manuals import manuals
from msatools.registry import GROUPS, NAMES, load
from tests.support.calls import CORE, call, with_operands
from tests.support.tools import need

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
TABLE = ("--types", "btf", CORE)
NO_SANDBOX = "without a sandbox"
CLEAN = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/nonexistent"}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, built from a copy of what is committed."""
    need("dh", "debhelper")
    need("dpkg-buildpackage", "dpkg-dev")
    copy = tmp_path_factory.mktemp("copy") / "msatools"
    subprocess.run(["git", "clone", "--quiet", ROOT, copy], check=True)
    env = {**os.environ, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    subprocess.run([copy / "packaging/deb.sh"], env=env, check=True)
    (deb,) = (copy / "dist").glob("*.deb")
    return deb


@pytest.fixture(scope="module")
def root(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's files, unpacked."""
    root = tmp_path_factory.mktemp("root")
    subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    return root


def test_name_and_dependencies(package: Path) -> None:
    fields = ("Package", "Version", "Depends")
    done = subprocess.run(
        ["dpkg-deb", "-f", package, *fields], capture_output=True, text=True, check=True
    )
    start = f"Package: msatools\nVersion: {msatools.__version__}\nDepends: "
    assert done.stdout.startswith(start)
    assert re.search(r"python3 \(>= 3\.\d+~\), python3 \(<< 3\.\d+~\)", done.stdout)


def test_commands_run(root: Path) -> None:
    scripts = {path.name for path in (root / "usr/bin").iterdir()}
    assert scripts == {"msa", *(f"msa-{name}" for name in (*NAMES, *GROUPS))}
    for name in NAMES:
        words = with_operands(load(name), *TABLE)
        done = subprocess.run(
            [root / "usr/bin" / f"msa-{name}", *words],
            env=CLEAN,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        expected = call(load(name), *words).out.splitlines()
        # The package recommends what a sandbox needs, which is not in the root.
        printed = [line for line in done.stdout.splitlines() if NO_SANDBOX not in line]
        assert printed[0] == expected[0]
        assert len(printed) == len(expected)


def test_manuals_and_completion_are_where_debian_has_them(root: Path) -> None:
    share = root / "usr/share"
    pages = {path.name for path in (share / "man/man1").iterdir()}
    assert pages == {f"{page}.gz" for page in manuals()}
    for path in (
        "bash-completion/completions/msa",
        "zsh/vendor-completions/_msa",
        "fish/vendor_completions.d/msa.fish",
        "doc/msatools/SECURITY.md",
    ):
        assert (share / path).is_file() or (share / f"{path}.gz").is_file(), path


def test_version_of_the_changelog() -> None:
    text = (ROOT / "packaging/debian/changelog").read_text()
    assert text.startswith(f"msatools ({msatools.__version__}) ")
