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

from tests.support.calls import CORE
from tests.support.schemas import check_schema

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/adding-a-command.md").read_text()
FILE = re.compile(r"^`([^`\n]+)`:\n\n```(python|diff)\n(.*?)^```$", re.M | re.S)
CONSOLE = re.compile(r"^```console\n\$ (msa-.*?)\n(.*?)^```$", re.M | re.S)
MOST_LINES = 150
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
GOLDEN = ("tests/test_contract.py", "tests/render/test_widths.py")
TABLES = (
    *("tests/derived", "tests/test_registry.py", "tests/test_options.py", *GOLDEN),
    *("tests/cli/test_recording.py", "tests/cli/test_diff.py"),
    *("tests/selfcheck/test_report.py", "tests/test_presentation.py"),
)
"""Tests of all commands, each of which has a case for a new one."""

FACTS = "tests/test_registry.py::test_every_command_has_facts[files]"
"""Needs a figure that a guest records: the guide names it as a step."""

VERSION = "tests/test_contract.py::test_version[files]"
"""Runs the script of the installation, which has none of the copy."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree in which all that the guide says is done."""
    tree = tmp_path_factory.mktemp("tree")
    # With its byte code, which is valid as files keep their times.
    for name in ("msatools", "commands", "tests"):
        shutil.copytree(ROOT / name, tree / name)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "docs/schema", tree / "docs/schema")
    (tree / "fixtures").symlink_to(ROOT / "fixtures")
    # As it is installed.
    (tree / "msatools/commands").symlink_to(tree / "commands")
    for path, language, text in FILE.findall(GUIDE):
        if language == "diff":
            patch(tree / path, text)
        else:
            write(tree / path, text)
    run(tree, "setup.py", "-q", "egg_info")  # what pip install makes of the scripts
    run(tree, "-m", "msatools.derived.schemas")  # make schema
    run(tree, *PYTEST, "--record-golden", "-k", "files", *GOLDEN)  # make golden
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


def run(tree: Path, *words: str, status: int = 0) -> str:
    """Run Python in the copy; return what it prints, if it fails its error first."""
    env = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, *words], cwd=tree, env=env, capture_output=True, text=True
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr + done.stdout if status else done.stdout


def files(tree: Path, *words: str, before: str = "", status: int = 0) -> str:
    """Run the script that an installation of the copy has.

    :param before: Code that is run in its process first.
    """
    load = "from importlib.metadata import distribution as of"
    code = "(script,) = of('msatools').entry_points.select(name='msa-files')"
    call = "import sys; sys.exit(script.load()())"
    return run(tree, "-c", f"{load}; {code}\n{before}\n{call}", *words, status=status)


def test_prints_what_the_guide_shows(tree: Path) -> None:
    ((line, shown),) = CONSOLE.findall(GUIDE)
    name, *words = shlex.split(line)
    assert name == "msa-files"
    assert files(tree, *words) == shown
    report = json.loads(files(tree, "--json", *words))
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
    assert re.search(r"^2 passed", run(tree, *PYTEST, "tests/files"), re.M)


def test_is_tested_as_all_commands(tree: Path) -> None:
    """All demands on a new command are met, but for the facts."""
    words = ("-k", "files or test_schemas or test_scripts", "--deselect", VERSION)
    done = run(tree, *PYTEST, "-rf", *words, *TABLES, status=1)
    assert re.findall(r"^FAILED (\S+)", done, re.M) == [FACTS]
    assert "tests/truth/tables.py" in GUIDE
    assert int(re.findall(r"(\d+) passed", done)[-1]) > 100


def test_its_json_is_described(tree: Path) -> None:
    schema = json.loads((tree / "docs/schema/files-1.json").read_text())
    rows = schema["$defs"]["ProcessFiles"]
    for described in (*schema["properties"].values(), *rows["properties"].values()):
        assert described["description"].endswith(".")


def test_self_check(tree: Path) -> None:
    """Its number is compared with the bitmaps, and a wrong one is noticed."""
    words = ("--self-check", "--json", "--strict", CORE)
    checks = {each["name"]: each for each in json.loads(files(tree, *words))["checks"]}
    assert {each["verdict"] for each in checks.values()} == {"ok"}
    counted = json.loads(files(tree, "--json", CORE))["processes"]
    assert checks["files.open"]["right_value"] == sum(each["files"] for each in counted)
    broken = (
        "from msatools.kernel.files import Descriptors; whole = Descriptors.all_files; "
        "Descriptors.all_files = lambda self, tables, row: whole(self, tables, row)[:9]"
    )
    done = files(tree, *words, before=broken, status=3)
    failed = {
        each["name"] for each in json.loads(done)["checks"] if each["verdict"] != "ok"
    }
    assert failed == {"files.open"}


def test_diff(tree: Path, tmp_path: Path) -> None:
    """The rows that differ are shown, and no others."""
    report = json.loads(files(tree, "--json", CORE))
    before, after = tmp_path / "before", tmp_path / "after"
    before.write_text(json.dumps(report))
    rows = {each["pid"]: each for each in report["processes"]}
    rows[204]["files"] += 5
    report["processes"].remove(rows[208])
    after.write_text(json.dumps(report))
    done = files(tree, "--diff", str(before), str(after), "--json")
    changes = json.loads(done)["changes"]["processes"]
    assert [(each["change"], each["key"], each["deltas"]) for each in changes] == [
        ("gone", {"pid": 208, "comm": "slab"}, {"files": -149}),
        ("changed", {"pid": 204, "comm": "shmem"}, {"files": 5}),
    ]
    code = f"import json; from {check_schema.__module__} import check_schema as check"
    run(tree, "-c", f"{code}; check(json.loads({done!r}))")
    shown = files(tree, "--diff", str(before), str(after)).splitlines()
    assert [line.split() for line in shown[-2:]] == [
        ["-", "208", "slab", "-149"],
        ["204", "shmem", "+5"],
    ]


def test_record(tree: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "recording")
    assert files(tree, "--record", file, CORE) == files(tree, file)
    assert files(tree, "--json", file) == files(tree, "--json", CORE)
    refused = files(tree, file, "-p", "1", status=2)
    assert refused.startswith("msa-files: -p: recordings do not have it; ")


def test_completion_and_manual(tree: Path, tmp_path: Path) -> None:
    run(tree, "-m", "msatools.derived.manuals", str(tmp_path))
    for path in ("bash-completion/completions/msa-files", "man/man1/msa-files.1"):
        assert (tmp_path / path).exists()
    fish = (tmp_path / "fish/vendor_completions.d/msa-files.fish").read_text()
    for option in ("-s p", "-s n", "-l self-check", "-l diff", "-l record"):
        assert f"complete -c msa-files {option} " in fish


def test_is_small() -> None:
    """One file, one folder, one registration."""
    written = {path: text for path, _, text in FILE.findall(GUIDE)}
    start = "commands/", "msatools/files/"
    own = {path for path in written if path.startswith(start)}
    assert {*written} - own == {
        *("msatools/registry.py", "pyproject.toml"),
        *("tests/files/test_files.py", "tests/contract/table.py"),
    }
    assert sum(written[path].count("\n") for path in own) <= MOST_LINES
