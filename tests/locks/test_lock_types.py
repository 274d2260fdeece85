# SPDX-License-Identifier: LGPL-2.1-or-later

"""The table of lock types."""

from collections import Counter
from typing import get_args

from msatools.locks.kernel_locks import LIST_LOCKS
from msatools.locks.lock_types import LOCK_TYPES
from msatools.locks.report import LockTypeName
from msatools.locks.sleeping_locks import SLEEPING_LOCK


def test_each_name_is_of_one_type() -> None:
    names = Counter(name for lock_type in LOCK_TYPES for name in lock_type.names)
    assert names == Counter(get_args(LockTypeName))


def test_a_lock_with_a_list_of_waiters_is_a_sleeping_lock() -> None:
    assert LIST_LOCKS.keys() < SLEEPING_LOCK.names


def test_a_class_of_tasks_waits_for_one_type_at_most() -> None:
    classes = Counter(lock_type.task_class for lock_type in LOCK_TYPES)
    del classes[None]
    assert set(classes.values()) == {1}
