# SPDX-License-Identifier: LGPL-2.1-or-later

"""drgn's crash commands print without debug info what they print with it."""

from collections.abc import Sequence

import pytest
from drgn.commands._crash.common import CRASH_COMMAND_NAMESPACE

from fixtures import lab
from tests.indrgn import crash
from tests.indrgn.differences import between
from tests.indrgn.pairs import Pair, open_pair


@pytest.fixture(scope="module", params=["memory-6.12", "crash-6.12"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return open_pair(lab.build(request.param))


def test_every_command_is_tried(pair: Pair) -> None:
    known = {name for name, _ in CRASH_COMMAND_NAMESPACE.enabled(pair.btf)}
    tried = {"*" if line[0] == "*" else line.split()[0] for line in crash.LINES}
    assert tried == known


def test_equal_or_named(pair: Pair) -> None:
    check(pair, [line for line in crash.LINES if not line.startswith(crash.SLOW)])


@pytest.mark.long
@pytest.mark.parametrize("name", ["memory-5.10", "plain-7.x", "plain-6.12arm64"])
def test_equal_or_named_on_other_kernels(name: str) -> None:
    check(open_pair(lab.build(name)), crash.LINES)


def check(pair: Pair, lines: Sequence[str]) -> None:
    """Fail if any line differs in a way that has no name."""
    places = crash.fields(pair.dwarf)
    wrong, equal = [], 0
    for line in lines:
        dwarf, btf = (crash.say(prog, line, places) for prog in (pair.dwarf, pair.btf))
        try:
            equal += not between(pair, line, dwarf, btf)
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)
    assert equal > 0.8 * len(lines)
