# SPDX-License-Identifier: LGPL-2.1-or-later

"""drgn's helpers return without debug info what they return with it."""

from fixtures import lab
from tests.indrgn.helpers import compare
from tests.indrgn.pairs import open_pair


def test_helpers(run_612: lab.Run) -> None:
    share = compare(open_pair(run_612))
    assert not share.others
    assert share.called > 200
