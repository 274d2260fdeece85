# SPDX-License-Identifier: LGPL-2.1-or-later

"""State letters of threads made by hand."""

import numpy as np
import pytest

from msatools.tasks.states import LETTERS, letters, loads
from msatools.tasks.table import TaskTable

# state, exit_state, the letter in /proc, whether it counts in the load average.
CASES = {
    "running": (0x0, 0, "R", False),
    "interruptible": (0x1, 0, "S", False),
    "interruptible-freezable": (0x2001, 0, "S", False),
    "uninterruptible": (0x2, 0, "D", True),
    "killable": (0x102, 0, "D", True),
    "idle": (0x402, 0, "I", False),
    "noload-alone": (0x400, 0, "R", False),
    "stopped": (0x4, 0, "T", False),
    "stopped-wakekill": (0x104, 0, "T", False),
    "traced": (0x8, 0, "t", False),
    "traced-wakekill": (0x108, 0, "t", False),
    "parked": (0x40, 0, "P", False),
    "frozen": (0x8000, 0, "D", False),
    "rtlock": (0x1000, 0, "D", False),
    "new": (0x800, 0, "R", False),
    "dying": (0x80, 0, "R", False),
    "zombie": (0x80, 0x20, "Z", False),
    "zombie-over-state": (0x2, 0x20, "Z", None),
    "dead": (0x80, 0x10, "X", False),
    "dead-and-zombie": (0x80, 0x30, "Z", False),
}


def table(*states: tuple[int, int]) -> TaskTable:
    records = np.array([*states], [("state", "u4"), ("exit_state", "i4")])
    return TaskTable(records, frozenset(("state", "exit_state")))


@pytest.mark.parametrize("case", CASES)
def test_letter(case: str) -> None:
    state, exit_state, letter, counts = CASES[case]
    # The letter does not depend on other rows.
    some = table((state, exit_state), *(case[:2] for case in CASES.values()))
    assert letters(some).tolist() == [letter, *(case[2] for case in CASES.values())]
    assert letter in LETTERS
    assert counts is None or loads(some)[0] == counts


def test_none() -> None:
    assert letters(table()).tolist() == loads(table()).tolist() == []
