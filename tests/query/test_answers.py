# SPDX-License-Identifier: LGPL-2.1-or-later

"""What an answer prints of itself, and what a wrong question is told."""

import pytest
from msgspec.structs import replace

import msatools
from fixtures.demo import DEMOS
from msatools.cpus.cpus import collect_cpus
from msatools.query.kernel import Kernel

DEMO = DEMOS["6.12"].core


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return msatools.open(str(DEMO))


@pytest.mark.parametrize("ask", ["thread", "process", "children"])
def test_an_answer_is_one_line(kernel: Kernel, ask: str) -> None:
    text = repr(getattr(kernel, ask)(1))
    assert "\n" not in text
    assert len(text) <= 120
    assert " 1" in text
    assert "user" in text


def test_a_task_is_asked_for_by_a_number(kernel: Kernel) -> None:
    with pytest.raises(TypeError, match="by its ID, an int, not str '1'"):
        kernel.thread("1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="by its ID, an int, not bool True"):
        kernel.thread(True)


@pytest.mark.parametrize("ask", ["thread", "process", "children"])
def test_a_wrong_question_needs_no_kernel(ask: str) -> None:
    """There may be none that runs, which is another matter."""
    with pytest.raises(TypeError, match="by its ID, an int, not str '1'"):
        getattr(msatools, ask)("1")


def test_a_kernel_says_which_it_is(kernel: Kernel) -> None:
    text = repr(kernel)
    assert DEMO.name in text
    assert "6.12." in text
    assert len(text) <= 120


def test_names_of_odd_characters_are_cut(kernel: Kernel) -> None:
    text = repr(replace(kernel.thread(1), comm="\x1b" * 15))
    assert len(text) <= 120
    assert text.isprintable()


def test_a_report_is_of_a_program() -> None:
    with pytest.raises(TypeError, match=r"must be a drgn.Program.* not int"):
        collect_cpus(5)  # type: ignore[arg-type]
