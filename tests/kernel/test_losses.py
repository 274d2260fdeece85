# SPDX-License-Identifier: LGPL-2.1-or-later

"""Losses that two parts of a scan share, and losses that count on a running kernel."""

import pytest

from msatools.kernel.report import Loss, LossLog, spoils


def test_what_two_parts_lost_counts_once_and_the_rest_is_kept() -> None:
    first, second = LossLog(), LossLog()
    first.lose(Loss.INODES, "an inode is lost")
    first.lose(Loss.TREES, "a tree is broken", count=3, about="a tree")
    second.lose(Loss.INODES, "an inode is lost again")
    second.lose(Loss.LISTS, "a list is broken")
    first.cover(second)
    assert first.lost == {
        Loss.INODES.value: 1,
        Loss.TREES.value: 3,
        Loss.LISTS.value: 1,
    }
    assert first.about == {"a tree": 3}
    texts = {note.text for note in first.notes.values()}
    assert texts == {"an inode is lost", "a tree is broken", "a list is broken"}


@pytest.mark.parametrize(
    "loss", [Loss.HOTPLUG, Loss.IDLE_STATES, Loss.LIMITS, Loss.TICKS, Loss.TOPOLOGY]
)
def test_what_stays_while_a_kernel_runs_is_a_loss_there_too(loss: Loss) -> None:
    assert spoils(loss.value, live=True)


@pytest.mark.parametrize("loss", [Loss.FILES, Loss.INODES, Loss.STACKS, Loss.WAITS])
def test_what_may_go_away_is_a_loss_in_a_dump_alone(loss: Loss) -> None:
    assert spoils(loss.value, live=False)
    assert not spoils(loss.value, live=True)
