# SPDX-License-Identifier: LGPL-2.1-or-later

"""Each function of the kernel that sleeps uninterruptibly is known to a rule."""

import pytest

from tests.support.dumps import open_dump
from tests.tasks.waitfunctions import sleepers, unknown


@pytest.mark.parametrize(
    "name", ["field-6.1", "field-6.12", "field-7.x", "memory-5.10"]
)
def test_no_wait_is_unknown(name: str) -> None:
    prog = open_dump(name, "btf")
    found = {*sleepers(prog)}
    assert found >= {"blk_mq_get_tag", "rq_qos_wait", "rwsem_down_read_slowpath"}
    assert unknown(prog) == []
