# SPDX-License-Identifier: LGPL-2.1-or-later

"""User and parent of each thread, by their IDs in the initial namespaces."""

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.rows import NOT_FOUND, find_rows
from msatools.kernel.strings import decode_string
from msatools.kernel.structs import read_structs
from msatools.tasks.table import TaskTable

UNKNOWN = -1

Numbers = npt.NDArray[np.int64]

_CRED = {"uid": ("uid.val",), "euid": ("euid.val",)}
_TASK = {"tgid": ("tgid",)}


class Users(Struct, frozen=True):
    """One value a thread; :data:`UNKNOWN` if unreadable."""

    uid: Numbers
    """The real user (``cred->uid``)."""

    euid: Numbers
    """The effective user."""


class Identities(Users, frozen=True):
    """One value a thread; :data:`UNKNOWN` if unreadable."""

    ppid: Numbers
    """The parent process; 0 for tasks that the kernel itself started."""


def read_identities(reader: Reader, tasks: TaskTable, losses: LossLog) -> Identities:
    """Read the user and the parent of each thread."""
    users = read_users(reader, tasks, losses)
    return Identities(users.uid, users.euid, _parents(reader, tasks, losses))


def read_users(reader: Reader, tasks: TaskTable, losses: LossLog) -> Users:
    """Read the user of each thread."""
    creds = read_structs(
        reader, "struct cred", _CRED, tasks["cred"].astype(np.uint64), losses
    )
    return Users(
        uid=np.where(creds.readable, creds["uid"].astype(np.int64), UNKNOWN),
        euid=np.where(creds.readable, creds["euid"].astype(np.int64), UNKNOWN),
    )


def _parents(reader: Reader, tasks: TaskTable, losses: LossLog) -> Numbers:
    """Return the process IDs of the parents.

    Usually the table has every parent but the idle task (PID 0).
    """
    parents: Addresses = tasks["real_parent"].astype(np.uint64)
    row = find_rows(tasks["address"], parents)
    ppid: Numbers = tasks["tgid"][row].astype(np.int64)
    elsewhere = row == NOT_FOUND
    others = read_structs(
        reader, "struct task_struct", _TASK, parents[elsewhere], losses
    )
    ppid[elsewhere] = np.where(others.readable, others["tgid"], UNKNOWN)
    return ppid


def comm_text(value: bytes) -> str:
    """Decode a task's name; bytes that are not UTF-8 are escaped."""
    return decode_string(bytes(value))
