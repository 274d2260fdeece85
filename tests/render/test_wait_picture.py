# SPDX-License-Identifier: LGPL-2.1-or-later

"""The picture of who waits for whom: its colours, and what is not drawn."""

import re

from msatools.locks.report import LocksReport
from msatools.render.memstat.picture import Picture
from msatools.render.report.wait_picture import ROOTS, wait_picture
from tests.locks.madelocks import lock, owner, report, root, wait


def drawn(made: LocksReport) -> tuple[Picture, list[str]]:
    picture = wait_picture(made)
    assert picture is not None
    return picture, [label.text for label in picture.labels]


def test_what_the_colours_mean() -> None:
    """Each kind of box has a line, and none that is not drawn."""
    made = report(
        [wait(2, "mutex 1")], [lock("mutex 1", (2,), [owner("=1")])], [root(1, (1, 0))]
    )
    _, texts = drawn(made)
    key = ["what all to its right wait for", "a lock, or another thing waited for"]
    assert texts[:3] == [*key, "a task that waits, its state, and for how long"]
    assert texts[3:] == ["2 task-2 D 2.0s", "mutex 1", "pid 1 task-1: runs on CPU 1"]
    _, crowd = drawn(
        report(
            [wait(pid, "mutex 1") for pid in range(2, 30)],
            [lock("mutex 1", range(2, 30), [owner("=1")])],
            [root(1, (28, 0))],
        )
    )
    assert "not drawn, or drawn already" in crowd
    assert "22 more" in crowd


def test_roots_that_are_left_out_are_counted() -> None:
    many = [root(pid, (0, 0)) for pid in range(1, ROOTS + 8)]
    _, texts = drawn(report(roots=many))
    assert texts[-1] == "… 7 more roots"
    _, texts = drawn(report(roots=many[:ROOTS]))
    assert not re.search("more roots", " ".join(texts))
