# SPDX-License-Identifier: LGPL-2.1-or-later

"""The cores as they lie in the repository. Needs neither QEMU nor the lab."""

import json
import struct

import pytest
from drgn import FaultError

from fixtures.demo import MAX_BYTES, QUESTIONS, Demo, catalog
from fixtures.demo.check import differences
from fixtures.demo.questions import ask, ask_helpers, comparable
from msatools.program import Opened
from tests.conftest import Msa


@pytest.mark.kernels
@pytest.mark.parametrize("question", QUESTIONS)
def test_command_answers_as_the_whole_dump_did(
    demo: Demo, opened: Opened, question: str
) -> None:
    found = ask(opened.prog, question)
    assert list(differences(demo.answers()[question], found)) == []


@pytest.mark.kernels
def test_helpers_answer_as_on_the_whole_dump(demo: Demo, opened: Opened) -> None:
    found = ask_helpers(opened.prog)
    assert list(differences(demo.answers()["helpers"], found)) == []


def test_answers_say_something(demo: Demo) -> None:
    """Two empty answers are equal, too."""
    answers = demo.answers()
    assert list(answers) == [*QUESTIONS, "helpers"]
    memstat = answers["memstat"]
    assert memstat["pages"] == 196_608
    assert sum(count["pages"] for count in memstat["classes"]) == memstat["pages"]
    assert memstat["coverage"].pop("sections") == 6
    assert set(memstat["coverage"].values()) == {0}
    assert not [
        check
        for check in memstat["checks"]
        if check["difference"] and not check["explained_by"]
    ]
    helpers = answers["helpers"]
    assert helpers["tasks"][0]["pid"] == 1
    stacks = [task["stack"] for task in helpers["tasks"]]
    assert len(stacks) > 100
    assert all(len(stack.split()) > 3 for stack in stacks if stack)
    assert any("Linux version" in line for line in helpers["log"])


def test_target(demo: Demo, opened: Opened) -> None:
    target = opened.target
    assert (target.kind, target.format) == ("kdump", "kdump zlib")
    assert target.release == demo.facts()["kernel"]["release"]
    assert target.release.startswith(f"{demo.name}.")
    assert (target.types, target.dump_level) == ("btf", 31)
    assert not target.truncated
    assert target.crash is None


def test_command_line(demo: Demo, msa: Msa) -> None:
    done = msa("--types", "btf", "--strict", "--json", demo.core)
    assert (done.returncode, done.stderr) == (0, "")
    assert comparable(json.loads(done.stdout)) == demo.answers()["memstat"]


def test_page_that_was_not_read_is_no_zeros(opened: Opened, demo: Demo) -> None:
    """Of the first 16 MiB most was never asked for."""
    faults = 0
    for address in range(0, 16 << 20, 4096):
        try:
            opened.prog.read(address, 8, physical=True)
        except FaultError as error:
            assert "Excluded page" in str(error)  # noqa: PT017 - those without pass
            faults += 1
    assert faults > 3000


def test_registers_are_kept(demo: Demo) -> None:
    """One NT_PRSTATUS for each of the two CPUs, for stacks of tasks that run."""
    data = demo.core.read_bytes()
    at, size = struct.unpack_from("<2Q", data, 4096 + 48)
    assert data[at : at + size].count(b"CORE\0") == 2


def test_file_is_the_one_recorded(demo: Demo) -> None:
    facts = demo.facts()
    assert demo.core.stat().st_size == facts["core"]["bytes"] <= MAX_BYTES
    assert catalog.sha256(demo.core) == facts["core"]["sha256"]
    assert facts["recorded"]["questions"] == list(QUESTIONS)


def test_readme_says_where_the_cores_are_from() -> None:
    readme = catalog.README.read_text()
    facts = [demo.facts() for demo in catalog.DEMOS.values()]
    assert catalog.with_table(readme, facts) == readme
    for fact in facts:
        assert fact["kernel"]["source"] in readme
