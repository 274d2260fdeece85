# SPDX-License-Identifier: LGPL-2.1-or-later

"""Servers of network file systems, for which tasks wait.

Of NFS (net/sunrpc), the transport of a client is the same for all file systems of one
server, and has its address and its requests. Of the others only the file system is
known.
"""

from collections.abc import Hashable, Iterator
from contextlib import suppress

from msgspec import Struct

from msatools.errors import LOST
from msatools.kernel.losses import Loss
from msatools.kernel.strings import read_string
from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Lock
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.base.storage import super_blocks
from msatools.reports.units import duration
from msatools.target.addresses import KERNEL_HALF

_PROTOCOLS = {
    "nfs": "NFS",
    "nfs4": "NFS",
    "cifs": "SMB",
    "smb3": "SMB",
    "ceph": "Ceph",
    "9p": "9P",
    "afs": "AFS",
}
"""Maps types of file systems to protocols."""

_CLIENTS = {
    "NFS": ("rpc_", "__rpc_", "nfs_", "nfs3_", "nfs4_"),
    "SMB": ("cifs_", "smb2_", "smb3_", "wait_for_response"),
    "Ceph": ("ceph_",),
    "9P": ("p9_", "v9fs_"),
    "AFS": ("afs_",),
}
"""Prefixes of the functions that wait for those servers."""

_CONNECTED = 1 << 1
"""``XPRT_CONNECTED`` of ``rpc_xprt.state`` (include/linux/sunrpc/xprt.h)."""

_FEW = 3
_MAX_NAME = 255
_MAX_TASKS = 1 << 12
"""Maximum number of requests of one client to look at."""

_MAX_PARENTS = 8
"""Maximum number of clients cloned from each other."""


class FileServer(Struct, frozen=True):
    """A server of a network file system."""

    identity: Hashable
    """Equal for tasks that wait for the same server."""

    text: str
    path: str | None = None
    """Where its file system is mounted, if it is one."""


class _Client(Struct, frozen=True):
    """A client of RPC (``struct rpc_clnt``), and its transport."""

    client: int
    transport: int


def file_server(
    context: LockContext,
    case: BlockedTask,
    lock: Lock | None,
    super_block: int,
    path: str | None,
) -> FileServer | None:
    """
    Return the server of a network file system that a task waits for.

    :param lock: The lock or bit that it waits for, if known.
    :param super_block: Super block of the data that it waits for; 0 if unknown.
    :param path: Where that file system is mounted.
    :raises drgn.FaultError: if a structure that leads to it cannot be read
    """
    kind = context.storage.file_system_type(super_block) if super_block else None
    if kind not in _PROTOCOLS:
        super_block, path = 0, None
    protocol = _PROTOCOLS.get(kind or "") or asked_protocol(case)
    if protocol is None:
        return None
    if protocol == "NFS":
        client = _of_mount(context, super_block) or _of_request(context, lock)
        if client is not None:
            known = _servers(context)
            if client.transport not in known:
                known[client.transport] = _nfs(context, client)
            return known[client.transport]
    text = f"{protocol} server ({path})" if path else f"{protocol} server"
    if super_block:
        return FileServer(("super_block", super_block), text, path)
    # Only types in modules identify the server: assume one for each task.
    return FileServer(("task", case.address), text)


def asked_protocol(case: BlockedTask) -> str | None:
    """Return the protocol whose client's functions are on a task's stack."""
    for protocol, prefixes in _CLIENTS.items():
        if any(function.startswith(prefixes) for function in case.names):
            return protocol
    return None


def _of_mount(context: LockContext, super_block: int) -> _Client | None:
    """Return the client of an NFS file system."""
    if not super_block:
        return None
    layout = context.layout
    try:
        server = layout.member(super_block, "super_block", "s_fs_info")
        return _client(context, layout.member(server, "nfs_server", "client"))
    except LOST:
        return None


def _of_request(context: LockContext, lock: Lock | None) -> _Client | None:
    """Return the client of a request: a task waits for a bit of its ``tk_runstate``."""
    layout = context.layout
    if lock is None or lock.type != "bit_wait" or not lock.address:
        return None
    try:
        request = lock.address - layout.offset("rpc_task", "tk_runstate")
        return _client(context, layout.member(request, "rpc_task", "tk_client"))
    except LOST:
        return None


def _client(context: LockContext, client: int) -> _Client | None:
    """Return a client of RPC; ``None`` if there is none at an address."""
    layout = context.layout
    if client < KERNEL_HALF:
        return None
    transport, head = layout.members(client, "rpc_clnt", "cl_xprt", "cl_tasks.next")
    if min(transport, head) < KERNEL_HALF:
        return None
    # The list of tasks leads back to the client.
    place = client + layout.offset("rpc_clnt", "cl_tasks")
    if layout.word(head + 8) != place:
        return None
    return _Client(client, transport)


@per_context
def _servers(context: LockContext) -> dict[int, FileServer]:
    """Map each transport of NFS to its server, as many tasks may wait for one."""
    return {}


@per_context
def _mounts(context: LockContext) -> dict[int, list[str]]:
    """Map each transport of NFS to where file systems of its server are mounted."""
    found: dict[int, list[str]] = {}
    try:
        for super_block in super_blocks(context.layout):
            kind = context.storage.file_system_type(super_block)
            if _PROTOCOLS.get(kind) != "NFS":
                continue
            if client := _of_mount(context, super_block):
                points = context.paths.mount_points(super_block)
                found.setdefault(client.transport, []).extend(points)
    except LOST as error:
        context.losses.lose(Loss.FILE_SYSTEMS, f"cannot read all file systems: {error}")
    return found


def _nfs(context: LockContext, client: _Client) -> FileServer:
    layout = context.layout
    words = ["NFS server"]
    paths = sorted(_mounts(context).get(client.transport, []))
    with suppress(*LOST):
        words.append(_address(context, client.transport))
    if paths:
        more = f" and {len(paths) - _FEW} more" if len(paths) > _FEW else ""
        words.append(f"({', '.join(paths[:_FEW])}{more})")
    text = " ".join(filter(None, words))
    with suppress(*LOST):
        state = layout.member(client.transport, "rpc_xprt", "state")
        text += ", connected" if state & _CONNECTED else ", not connected"
    if age := _oldest_ns(context, client):
        text += f", oldest request {duration(age)}"
    path = paths[0] if len(paths) == 1 else None
    return FileServer(("rpc_xprt", client.transport), text, path)


def _address(context: LockContext, transport: int) -> str:
    """Return the address of a server, as it is displayed; else its name."""
    layout = context.layout
    # RPC_DISPLAY_ADDR is the first of enum rpc_display_format_t.
    names = ("address_strings[0]", "servername")
    for pointer in layout.members(transport, "rpc_xprt", *names):
        if pointer >= KERNEL_HALF:
            return read_string(context.reader, pointer, _MAX_NAME)
    return ""


def _oldest_ns(context: LockContext, client: _Client) -> int | None:
    """Return the age of a server's oldest request; ``None`` if unknown."""
    if context.monotonic_ns is None:
        return None
    try:
        started = min(_started(context, client), default=None)
    except LOST:
        return None
    return None if started is None else max(0, context.monotonic_ns - started)


def _started(context: LockContext, client: _Client) -> Iterator[int]:
    """Yield when the tasks of a client, and of those cloned from it, were started."""
    layout = context.layout
    if not layout.has("rpc_task", "tk_start"):
        return
    link = layout.offset("rpc_task", "tk_task")
    address = client.client
    for _ in range(_MAX_PARENTS):
        head = address + layout.offset("rpc_clnt", "cl_tasks")
        node = layout.word(head)
        for _ in range(_MAX_TASKS):
            if node in (0, head):
                break
            node, start = layout.members(
                node - link, "rpc_task", "tk_task.next", "tk_start"
            )
            if start > 0:
                yield start
        parent = layout.member(address, "rpc_clnt", "cl_parent")
        if parent in (0, address) or parent < KERNEL_HALF:
            return
        address = parent
