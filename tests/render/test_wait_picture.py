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


def test_nothing_to_draw() -> None:
    assert wait_picture(report()) is None


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


def test_boxes_are_inside_and_have_room_for_their_texts() -> None:
    made = report(
        [wait(2, "mutex 1", comm="x" * 40)],
        [lock("mutex 1", (2,), [owner("=1")], name="a long name of a mutex " * 4)],
        [root(1, (1, 0))],
    )
    picture, _ = drawn(made)
    boxes = [box for some in picture.boxes.values() for box in some]
    assert all(box.x >= 0 and box.x + box.width <= picture.width for box in boxes)
    assert all(box.y >= 0 and box.y + box.height <= picture.height for box in boxes)
    whole = {label.title for label in picture.labels}
    assert any("a long name of a mutex a long" in title for title in whole)


def test_roots_that_are_left_out_are_counted() -> None:
    many = [root(pid, (0, 0)) for pid in range(1, ROOTS + 8)]
    _, texts = drawn(report(roots=many))
    assert texts[-1] == "… 7 more roots"
    _, texts = drawn(report(roots=many[:ROOTS]))
    assert not re.search("more roots", " ".join(texts))


def test_size_is_bounded() -> None:
    """Six waiters of each of six locks of each task, four times over."""
    waits, locks, owners, last = [], [], [1], 1
    for _ in range(3):
        below = []
        for pid in owners:
            for number in range(6):
                name = f"mutex {pid}-{number}"
                pids = [*range(last + 1, last + 7)]
                last += 6
                waits += [wait(each, name) for each in pids]
                locks.append(lock(name, pids, [owner(f"={pid}")]))
                below += pids
        owners = below
    assert len(waits) > 40_000
    picture, texts = drawn(report(waits, locks, [root(1, (len(waits), 0))]))
    # Each node may have a box for what is not drawn behind it.
    assert len(picture.labels) < 1100
    assert any(re.fullmatch(r"[\d,]+ more", text) for text in texts)
