# SPDX-License-Identifier: LGPL-2.1-or-later

"""The table of lock types."""

from collections import Counter
from typing import get_args

from msatools.locks.lock_types import LOCK_TYPES
from msatools.locks.report import LockTypeName


def test_each_name_is_of_one_type() -> None:
    names = Counter(name for lock_type in LOCK_TYPES for name in lock_type.names)
    assert names == Counter(get_args(LockTypeName))
