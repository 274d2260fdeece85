# SPDX-License-Identifier: LGPL-2.1-or-later

"""The plugin of sos, run by sos, which takes its time: ``make test-dist``."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from msatools.registry import NAMES, load
from tests.support.calls import CORE
from tests.support.schemas import check_schema
from tests.support.tools import need

PLUGIN = Path(__file__).parents[1] / "packaging/sos/msatools.py"
COLLECTED = tuple(name for name in NAMES if load(name).operands is None)
"""Commands that need no words, such as addresses."""


SOS = """
import sys
import sos.policies
from sos import SoS
# It would look for commands in the system's folders only.
sos.policies.Policy._set_PATH = lambda *_: None
SoS(sys.argv[1:]).execute()
"""
FIND = "import pathlib, sos; print(pathlib.Path(sos.__file__).parent)"
PYTHON = "/usr/bin/python3"
"""The Python that the system's sos is installed for."""


def install(folder: Path) -> None:
    """Make a copy of sos that has the plugin."""
    need("sos", "sosreport")
    found = subprocess.run(
        [PYTHON, "-c", FIND], capture_output=True, text=True, check=True
    )
    shutil.copytree(found.stdout.strip(), folder / "sos")
    shutil.copy(PLUGIN, folder / "sos/report/plugins")


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="sos needs root")
def test_collects_all_reports(tmp_path: Path) -> None:
    install(tmp_path / "python")
    # As on a machine whose running kernel is that of the demo.
    folder = tmp_path / "bin"
    folder.mkdir()
    script = Path(sys.executable).with_name("msa")
    (folder / "msa").write_text(
        f'#!/bin/sh\nname=$1; shift\nexec {script} "$name" "$@" --types btf {CORE}\n'
    )
    (folder / "msa").chmod(0o755)
    words = ("report", "--batch", "--only-plugins", "msatools", "--tmp-dir", tmp_path)
    ran = subprocess.run(
        [PYTHON, "-c", SOS, *words, "-z", "gzip"],
        env={
            **os.environ,
            "PATH": f"{folder}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(tmp_path / "python"),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    archives = [*tmp_path.glob("sosreport-*.tar.gz")]
    assert len(archives) == 1, ran.stdout + ran.stderr
    with tarfile.open(archives[0]) as archive:
        found = {}
        for name in archive.getnames():
            if "/sos_commands/msatools/" in name:
                data = archive.extractfile(name)
                assert data is not None
                found[Path(name).name] = json.loads(data.read())
    assert {*found} == {f"msa_{name}.json" for name in COLLECTED}
    for document in found.values():
        check_schema(document)


def test_it_knows_all_commands() -> None:
    text = PLUGIN.read_text()
    (listed,) = re.findall(r"^COMMANDS = \((.*)\)$", text, re.M)
    assert tuple(re.findall(r'"(\w+)"', listed)) == COLLECTED
