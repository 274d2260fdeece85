# SPDX-License-Identifier: LGPL-2.1-or-later

"""Wheels and sdists contain every module, and work with or without a compiler."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from msatools.derived.completions import completions
from msatools.derived.manuals import manuals

ROOT = Path(__file__).parents[1]

PACKAGED = (
    "msatools",
    "commands",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
BUILD = """\
import os, sys
from setuptools import build_meta
source, out = sys.argv[1:]
os.chdir(source)
build_meta.build_sdist(out)
build_meta.build_wheel(out)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist, and a wheel built from its contents."""
    out = tmp_path_factory.mktemp("dist")
    source = tmp_path_factory.mktemp("source")
    copy_source(source)
    build(source, out)
    (sdist,) = out.glob("*.tar.gz")
    unpacked = tmp_path_factory.mktemp("unpacked")
    subprocess.run(["tar", "-xf", sdist, "-C", unpacked], check=True)
    (inner,) = unpacked.iterdir()
    again = tmp_path_factory.mktemp("again")
    build(inner, again)
    (wheel,) = again.glob("*.whl")
    return sdist, wheel


def copy_source(target: Path) -> None:
    """Copy the sources of a package, without build results."""
    for name in PACKAGED:
        path = ROOT / name
        if path.is_dir():
            ignored = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(path, target / name, ignore=ignored)
        else:
            shutil.copy(path, target / name)


def build(source: Path, out: Path, **environment: str) -> None:
    subprocess.run(
        [sys.executable, "-c", BUILD, source, out],
        env=os.environ | environment,
        check=True,
        capture_output=True,
    )


def run_python(code: str, path: Path, **environment: str) -> str:
    """Run code in a directory and return its output."""
    words = [sys.executable, "-c", code]
    env = environment or None
    done = subprocess.run(words, cwd=path, env=env, stdout=subprocess.PIPE, check=True)
    return done.stdout.decode()


def run_wheel(code: str, wheel: Path, path: Path) -> list[str]:
    """Unpack a wheel, run code with it, and return the words of the output."""
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(path)
    return run_python(code, path, PYTHONPATH=str(path)).split()


def modules(folder: str) -> set[str]:
    """Return the paths of the Python files in a folder of the sources."""
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}


def python_files(names: Iterable[str]) -> set[str]:
    return {name for name in names if name.endswith(".py")}


def test_wheel_contains_every_module_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        names = wheel.namelist()
    commands = {f"msatools/{name}" for name in modules("commands")}
    assert python_files(names) == modules("msatools") | commands
    assert {"msatools/py.typed", "msatools/selfdesc/globals.txt"} <= set(names)
    tops = {name.partition("/")[0] for name in names}
    rest = {top for top in tops if not top.endswith((".dist-info", ".data"))}
    assert rest == {"msatools"}


def test_wheel_contains_what_is_made_from_the_commands(
    built: tuple[Path, Path],
) -> None:
    """Manual pages and completion, as its own modules make them."""
    with zipfile.ZipFile(built[1]) as wheel:
        found = {
            name.partition("/data/share/")[2]: wheel.read(name).decode()
            for name in wheel.namelist()
            if ".data/" in name
        }
    pages = {f"man/man1/{name}": text for name, text in manuals().items()}
    assert found == {**pages, **completions()}


def test_sdist_contains_every_module(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as sdist:
        names = [name.partition("/")[2] for name in sdist.getnames()]
    assert python_files(names) >= modules("msatools") | modules("commands")
    assert "msatools/selfdesc/globals.txt" in names


def test_wheel_runs(built: tuple[Path, Path], tmp_path: Path) -> None:
    code = (
        "import sys, msatools.commands.memstat as memstat, msatools.plugin\n"
        "from msatools import console\n"
        "print(memstat.__file__)\n"
        "sys.argv = ['msa-memstat', '--version']\n"
        "console.memstat()\n"
    )
    path, name, version = run_wheel(code, built[1], tmp_path)
    assert name == "msa-memstat"
    assert Path(path) == tmp_path / "msatools/commands/memstat.py"
    assert f"msatools-{version}-" in built[1].name


PARTS_IN_C = (
    "from msatools.memory import compiled\n"
    "from msatools.program import kdump_pages\n"
    "from msatools.selfdesc import tables\n"
    "parts = (compiled, kdump_pages, tables)\n"
    "print(compiled.__file__, *(part.library() is not None for part in parts))\n"
)


@pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None, reason="no compiler"
)
def test_wheel_contains_the_extensions(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    """They use the stable ABI, which any version of Python can load."""
    assert "-cp310-abi3-" in built[1].name
    here = str(tmp_path / "msatools/memory/compiled.py")
    assert run_wheel(PARTS_IN_C, built[1], tmp_path) == [here, *["True"] * 3]


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_installs_without_a_compiler(compiler: str, tmp_path: Path) -> None:
    source, out, target = (tmp_path / name for name in ("source", "out", "target"))
    source.mkdir()
    copy_source(source)
    build(source, out, CC=compiler)
    (wheel,) = out.glob("*.whl")
    here = str(target / "msatools/memory/compiled.py")
    assert run_wheel(PARTS_IN_C, wheel, target) == [here, *["False"] * 3]


def test_editable_install_leaks_no_package(tmp_path: Path) -> None:
    code = (
        "import msatools.commands.memstat, importlib.util\n"
        "print(importlib.util.find_spec('commands'))\n"
    )
    assert run_python(code, tmp_path) == "None\n"
