# SPDX-License-Identifier: LGPL-2.1-or-later

"""Recording from the lab's dump. The cores in the repository are of other boots.

That is done when a demo is added, and tested with what is long.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from drgn import FaultError
from drgn.helpers.linux.mm import follow_phys

from fixtures import lab
from fixtures.demo import Demo, questions
from fixtures.demo import check as checking
from fixtures.demo import record as recording
from fixtures.demo.catalog import sha256
from fixtures.demo.check import DemoError, check
from fixtures.demo.memory import PAGE
from fixtures.demo.record import Recorder, read_pages, record, write_core
from msatools.program import TargetError, TargetSpec, open_target

FEW = ("memstat", "zombies")
"""Enough to see how a demo is recorded; all that it answers is in test_cores.py."""


@pytest.fixture(scope="module", autouse=True)
def few_questions() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (questions, recording, checking):
            patch.setattr(module, "QUESTIONS", FEW)
        yield


@pytest.fixture(
    scope="module", params=[pytest.param("demo-6.12", marks=pytest.mark.long)]
)
def run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(request.param)


@pytest.fixture(scope="module")
def demo(run: lab.Run, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """A fresh recording."""
    demo = Demo("6.12", tmp_path_factory.mktemp("recorded"))
    record(demo, run)
    return demo


@pytest.fixture(scope="module")
def recorder(run: lab.Run, demo: Demo) -> Recorder:
    """The same dump, asked once more."""
    assert run.elf is not None
    recorder = Recorder(run.elf)
    read_pages(recorder, run.vmlinux, demo.answers())
    return recorder


def rewritten(demo: Demo, recorder: Recorder, directory: Path) -> Demo:
    """The demo with another core."""
    other = Demo(demo.name, directory)
    write_core(recorder, other.core)
    other.answers_file.write_text(demo.answers_file.read_text())
    facts = demo.facts_file.read_text()
    sums = demo.facts()["core"]["sha256"], sha256(other.core)
    other.facts_file.write_text(facts.replace(*sums))
    return other


def test_recording_answers_and_leaves_no_draft(demo: Demo) -> None:
    check(demo)
    files = sorted(path.suffix for path in demo.directory.iterdir())
    assert files == [".json", ".json", ".kdump"]


def test_same_dump_gives_same_core(
    demo: Demo, recorder: Recorder, tmp_path: Path
) -> None:
    again = rewritten(demo, recorder, tmp_path)
    assert len(recorder.pfns) == demo.facts()["core"]["pages"]
    assert again.core.read_bytes() == demo.core.read_bytes()


@pytest.mark.parametrize(
    "symbol", ["init_task", "node_data", "__start_BTF", "__start_orc_unwind"]
)
def test_page_that_is_lost_is_noticed(
    demo: Demo, recorder: Recorder, tmp_path: Path, symbol: str
) -> None:
    prog = open_target(TargetSpec(path=str(demo.core), types="btf")).prog
    place = follow_phys(prog["init_mm"].address_of_(), prog.symbol(symbol).address)
    lost = int(place) // PAGE
    recorder.pfns.remove(lost)
    try:
        other = rewritten(demo, recorder, tmp_path)
    finally:
        recorder.pfns.add(lost)
    with pytest.raises((DemoError, FaultError, TargetError)):
        check(other)


def test_other_answer_is_noticed(
    demo: Demo, recorder: Recorder, tmp_path: Path
) -> None:
    other = rewritten(demo, recorder, tmp_path)
    text = other.answers_file.read_text()
    pages = other.answers()["memstat"]["pages"]
    other.answers_file.write_text(text.replace(f'"pages": {pages}', '"pages": 1'))
    with pytest.raises(DemoError, match=f"/memstat/pages: 1 became {pages}"):
        check(other)
