# SPDX-License-Identifier: LGPL-2.1-or-later

"""Namespaces of each thread, by inode number, as ``readlink /proc/PID/ns/*``.

fs/proc/namespaces.c: the PID namespace is that of the thread's ``struct pid``, the user
namespace that of its credentials. All others are in its ``struct nsproxy``, which a
dead thread does not have.
"""

from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import MissingError
from msatools.kernel.pidnamespaces import innermost_numbers
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import read_structs
from msatools.tasks.table import TaskTable

UNKNOWN = -1

Inodes = npt.NDArray[np.int64]

_PROXY = {
    "mnt": ("mnt_ns",),
    "net": ("net_ns",),
    "uts": ("uts_ns",),
    "ipc": ("ipc_ns",),
    # Linux kernel commit 769071ac9f20 ("ns: Introduce Time Namespace") (in v5.6)
    "time": ("time_ns",),
    # Linux kernel commit a79a908fd2b0 ("cgroup: introduce cgroup namespaces") (in v4.6)
    "cgroup": ("cgroup_ns",),
}
_CRED = {"user": ("user_ns",)}
_INODE = {"inode": ("ns.inum",)}

_TYPES = {
    "pid": "struct pid_namespace",
    "user": "struct user_namespace",
    "mnt": "struct mnt_namespace",
    "net": "struct net",
    "uts": "struct uts_namespace",
    "ipc": "struct ipc_namespace",
    "time": "struct time_namespace",
    "cgroup": "struct cgroup_namespace",
}
KINDS = tuple(_TYPES)
"""Names of the kinds, as in /proc/PID/ns."""


class TaskNamespaces(Struct, frozen=True):
    """Inode numbers of namespaces by kind, one a thread.

    :data:`UNKNOWN` if unreadable, if the thread is dead, or if this kernel has no such
    namespaces.
    """

    inodes: Mapping[str, Inodes]


def read_namespaces(
    reader: Reader, tasks: TaskTable, losses: LossLog
) -> TaskNamespaces:
    """Read all namespaces of each thread, each namespace once."""
    addresses = _addresses(reader, tasks, losses)
    return TaskNamespaces(
        {
            kind: _inodes(reader, type_name, addresses.get(kind), len(tasks), losses)
            for kind, type_name in _TYPES.items()
        }
    )


def _addresses(
    reader: Reader, tasks: TaskTable, losses: LossLog
) -> dict[str, Addresses]:
    """Find the address of each thread's namespace, by kind."""
    found: dict[str, Addresses] = {}
    if tasks.has("thread_pid"):
        pids = tasks["thread_pid"].astype(np.uint64)
        found["pid"], _ = innermost_numbers(reader, pids, losses)
    creds = tasks["cred"].astype(np.uint64)
    read = [read_structs(reader, "struct cred", _CRED, creds, losses)]
    if tasks.has("nsproxy"):
        proxies = tasks["nsproxy"].astype(np.uint64)
        read.append(read_structs(reader, "struct nsproxy", _PROXY, proxies, losses))
    for structs in read:
        found |= {kind: structs[kind].astype(np.uint64) for kind in structs.columns}
    return found


def _inodes(
    reader: Reader,
    type_name: str,
    addresses: Addresses | None,
    count: int,
    losses: LossLog,
) -> Inodes:
    """Read the inode numbers of namespaces of one kind."""
    unknown = np.full(count, UNKNOWN, np.int64)
    if addresses is None:
        return unknown
    with suppress(MissingError):
        # A kernel without such namespaces does not have the type.
        read = read_structs(reader, type_name, _INODE, addresses, losses)
        if read.has("inode"):
            return np.where(read.readable, read["inode"].astype(np.int64), UNKNOWN)
    return unknown
