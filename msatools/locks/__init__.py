# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks, files and other tasks that tasks wait on, and their owners: msa-locks.

``locks`` collects a ``report``. ``lock_types`` is the table of all lock types, which
``kernel_locks``, ``user_locks``, ``file_locks``, ``completions`` and others define.
``ownership`` finds owners, ``graph`` roots and cycles.
"""

__all__ = (
    "locks",
    "report",
)
