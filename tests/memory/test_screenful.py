# SPDX-License-Identifier: LGPL-2.1-or-later

"""What msa-memstat shows first, and what a narrow terminal keeps."""

import pytest

from msatools.registry import load
from tests.support.calls import CORE, call

VIEWS = ("--by slab", "--by node", "--by cgroup", "--unattributed", "--frag")


def lines(*words: str) -> list[str]:
    ran = call(load("memstat"), *words, CORE)
    assert (ran.status, ran.err) == (0, "")
    return ran.out.splitlines()


@pytest.mark.parametrize("view", [*VIEWS[:3], VIEWS[4]])
def test_what_was_asked_for_comes_first(view: str) -> None:
    """The checks are a line above it; the classes are shown with -v."""
    plain, shown = lines(), lines(*view.split())
    table = next(n for n, line in enumerate(shown) if line == "")
    assert table <= 4
    assert shown[1] in plain
    assert "checks:" in shown[1]
    assert not any(line.startswith("Managed ") for line in shown)
    full = lines(*view.split(), "-v")
    classes = [line for line in plain if line.startswith(("Managed ", "Reserved "))]
    assert len(classes) == 2
    assert {*classes} <= {*full}
    header = next(n for n, line in enumerate(full) if line.startswith("CLASS  "))
    assert header > next(n for n, line in enumerate(full) if line == "")


def test_reason_of_a_difference_is_below_its_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there is no room beside it; and it is not cut."""
    (wide,) = (line for line in lines() if line.startswith("  stacks "))
    difference, reason = wide.rpartition("NR_KERNEL_STACK_KB")[2].split(None, 1)
    assert reason.strip() == "2 cached stacks"
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "")
    narrow = [line.replace("\x1b[0m", "") for line in lines("--color", "always")]
    at = next(n for n, line in enumerate(narrow) if line.rstrip().endswith(difference))
    assert "stacks" in narrow[at]
    assert narrow[at + 1].endswith(f"    {difference}: {reason.strip()}")
