# SPDX-License-Identifier: LGPL-2.1-or-later

"""The guide's command is built in a copy of the tree, as its readers do, and runs."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/adding-a-command.md").read_text()
FILE = re.compile(r"^`([^`\n]+)`:\n\n```(python|diff)\n(.*?)^```$", re.M | re.S)
CONSOLE = re.compile(r"^```console\n\$ (msa-.*?)\n(.*?)^```$", re.M | re.S)
MOST_LINES = 120


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree in which all that the guide says is done."""
    tree = tmp_path_factory.mktemp("tree")
    # With its byte code, which is valid as files keep their times.
    for name in ("msatools", "commands", "tests"):
        shutil.copytree(ROOT / name, tree / name)
    shutil.copy(ROOT / "pyproject.toml", tree)
    shutil.copytree(ROOT / "docs/schema", tree / "docs/schema")
    (tree / "fixtures").symlink_to(ROOT / "fixtures")
    # As it is installed.
    (tree / "msatools/commands").symlink_to(tree / "commands")
    for path, language, text in FILE.findall(GUIDE):
        if language == "diff":
            patch(tree / path, text)
        else:
            write(tree / path, text)
    run(tree, "-m", "msatools.derived.schemas")  # make schema
    return tree


def write(path: Path, text: str) -> None:
    assert not path.exists(), path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def patch(path: Path, text: str) -> None:
    """Add the lines with a plus after those without."""
    lines = text.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] == " ")
    after = "".join(line[1:] for line in lines)
    assert path.read_text().count(before) == 1, before
    path.write_text(path.read_text().replace(before, after))


def run(tree: Path, *words: str) -> str:
    env = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, *words], cwd=tree, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def msa_files(tree: Path, *words: str) -> str:
    """Run the script that an installation of the copy would have."""
    scripts = (tree / "pyproject.toml").read_text()
    ((module, function),) = re.findall(r'^msa-files = "(.+):(.+)"$', scripts, re.M)
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    return run(tree, "-c", code, *words)


def test_prints_what_the_guide_shows(tree: Path) -> None:
    ((line, shown),) = CONSOLE.findall(GUIDE)
    name, *words = shlex.split(line)
    assert name == "msa-files"
    assert msa_files(tree, *words) == shown
    report = json.loads(msa_files(tree, "--json", *words))
    assert report["schema"] == "msatools.files/1"
    assert [each["files"] for each in report["processes"]] == [149, 4, 3]


def test_is_a_command_of_drgn(tree: Path) -> None:
    code = (
        "import msatools.plugin\n"
        "from drgn.commands import DEFAULT_COMMAND_NAMESPACE as commands\n"
        "print(commands._commands['files'].description())\n"
    )
    assert run(tree, "-c", code) == "show how many files each process has open\n"


def test_its_own_test(tree: Path) -> None:
    words = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/files")
    assert re.search(r"^2 passed", run(tree, "-m", "pytest", *words), re.M)


def test_its_json_is_described(tree: Path) -> None:
    schema = json.loads((tree / "docs/schema/files-1.json").read_text())
    rows = schema["$defs"]["ProcessFiles"]
    for described in (*schema["properties"].values(), *rows["properties"].values()):
        assert described["description"].endswith(".")


def test_is_small() -> None:
    """One file, one folder, one registration."""
    files = {path: text for path, _, text in FILE.findall(GUIDE)}
    own = {path for path in files if path.startswith(("commands/", "msatools/files/"))}
    others = {"msatools/registry.py", "pyproject.toml", "tests/files/test_files.py"}
    assert {*files} - own == others
    assert sum(files[path].count("\n") for path in own) <= MOST_LINES
