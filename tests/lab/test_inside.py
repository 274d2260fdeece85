# SPDX-License-Identifier: LGPL-2.1-or-later
from fixtures.lab import inside


def test_msatools_is_there_as_it_is_when_installed() -> None:
    named = {"/lab/msatools/__init__.py", "/lab/msatools/commands/memstat.py"}
    assert named <= set(inside.sources())
