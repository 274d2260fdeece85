# SPDX-License-Identifier: LGPL-2.1-or-later

"""Options of msa-zombies, and the views that they select."""

from typing import Any

from msatools.commands.zombies import COMMAND

from tests.support import commandline
from tests.support.golden import Golden
from tests.zombies.madezombies import heir, leak, report, zombie

MADE = report(
    [zombie(2), zombie(3), zombie(4, 9, cgroup="/box", verdict="traced", tracer=5)],
    heirs=(heir(147, 1), heir(9, 1)),
    leaks=(leak(2, 3, task=1),),
)


def shown(*words: str, made: Any = MADE) -> list[str]:
    return commandline.shown(COMMAND, made, *words)


VIEWS = (
    *("", "--by parent", "--by cgroup", "--by verdict", "--by user"),
    *("--by ns", "--tree", "--leaks"),
)


def test_views(golden: Golden) -> None:
    lines = []
    for words in VIEWS:
        lines += [f"$ msa-zombies {words}", *shown(*words.split()), ""]
    golden("zombies/views", lines)
