# SPDX-License-Identifier: LGPL-2.1-or-later

"""The sdist and the wheel, installed where there is no compiler: ``make test-dist``.

The packages that they need are fetched from the network.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import msatools
from msatools.derived.manuals import manuals
from msatools.registry import GROUPS, NAMES, load
from tests.support.calls import CORE, call, with_operands

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
OLDEST = (3, 10)
VERSION = re.compile(r"python3\.(\d+)")
TABLE = ("--types", "btf", CORE)


def pythons() -> Iterator[Path]:
    """Yield the oldest Python that is supported, and the newest, of this machine."""
    folders = sorted(Path.home().glob(".pyenv/versions/*/bin"))
    # pyenv's shims are no interpreters.
    path = os.environ.get("PATH", "").split(":")
    folders += (Path(word) for word in path if not word.endswith("/shims"))
    found: dict[int, Path] = {}
    for folder in folders:
        for path in folder.glob("python3.*"):
            minor = VERSION.fullmatch(path.name)
            if minor and (3, int(minor[1])) >= OLDEST:
                found.setdefault(int(minor[1]), path)
    yield from (found[minor] for minor in sorted({min(found), max(found)}))


PYTHONS = [*pythons()]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that ``make dist`` fills."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "-o", out], cwd=ROOT, check=True)
    return out


def bare(environment: Path) -> dict[str, str]:
    """Return the variables of a shell that finds the environment, and no compiler."""
    tools = environment / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("env", "sh", "uname"):
        if not (tools / name).exists():
            (tools / name).symlink_to(str(shutil.which(name)))
    path = f"{environment}/bin:{tools}"
    assert shutil.which("cc", path=path) is shutil.which("gcc", path=path) is None
    return {"PATH": path, "HOME": str(environment), "LC_ALL": "C.UTF-8"}


def run(environment: Path, *words: str | Path, **variables: str) -> str:
    done = subprocess.run(
        words,
        cwd=environment,
        env={**bare(environment), **variables},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def make_environment(python: Path, folder: Path) -> Path:
    subprocess.run([python, "-m", "venv", folder], check=True)
    return folder


@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: path.name)
@pytest.mark.parametrize("pattern", ["*.whl", "*.tar.gz"])
def test_pip(dist: Path, tmp_path: Path, python: Path, pattern: str) -> None:
    (package,) = dist.glob(pattern)
    environment = make_environment(python, tmp_path / "environment")
    run(environment, "pip", "install", "--quiet", package)
    run(environment, "pip", "check")
    assert run(environment, "msa", "--version") == f"{msatools.__version__}\n"
    for name in NAMES:
        words = with_operands(load(name), *TABLE)
        shown = run(environment, f"msa-{name}", *words)
        assert shown.splitlines()[0] == call(load(name), *words).out.splitlines()[0]
        assert run(environment, "msa", name, *words).count("\n") == shown.count("\n")
    for name in GROUPS:
        assert run(environment, f"msa-{name}", "--help").startswith(
            f"USAGE: msa-{name}"
        )
    assert run(environment, "msa", "help", "it-hangs").startswith("It hangs\n")
    for page in manuals():
        assert (environment / "share/man/man1" / page).is_file()
    assert (environment / "share/bash-completion/completions/msa").is_file()
    code = "import msatools.memory.compiled as part; print(part.library())"
    has_library = run(environment, "python", "-c", code) != "None\n"
    assert has_library == (pattern == "*.whl"), "numpy does its work"


def test_pipx(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    environment = make_environment(PYTHONS[-1], tmp_path / "environment")
    run(environment, "pip", "install", "--quiet", "pipx")
    variables = {"PIPX_HOME": str(tmp_path / "pipx"), "PIPX_BIN_DIR": str(tmp_path)}
    variables |= {"PIPX_MAN_DIR": str(tmp_path / "man")}
    run(environment, "pipx", "install", wheel, **variables)
    scripts = {"msa", *(f"msa-{name}" for name in (*NAMES, *GROUPS))}
    assert {path.name for path in tmp_path.glob("msa*")} == scripts
    shown = run(environment, tmp_path / "msa-memstat", *TABLE)
    assert shown.splitlines()[-1] == call(load("memstat"), *TABLE).out.splitlines()[-1]
    assert {path.name for path in (tmp_path / "man/man1").iterdir()} == {*manuals()}


def test_wheel_serves_all_versions_of_python(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    version = re.escape(msatools.__version__)
    assert re.fullmatch(rf"msatools-{version}-cp310-abi3-linux_\w+\.whl", wheel.name)
