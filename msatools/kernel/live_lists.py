# SPDX-License-Identifier: LGPL-2.1-or-later

"""Walks of task lists, which on a running kernel change meanwhile."""

from collections.abc import Iterator

import drgn

from msatools.errors import UNREADABLE, DamagedDataError
from msatools.kernel.losses import Loss
from msatools.kernel.pids import PID_MAX_LIMIT
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.words import LIST_HEAD, U64
from msatools.selfdesc.find import find_type

_MAX_RESUMED = 256
"""Maximum number of times that one walk goes back to an entry still on the list."""


def changing_list(
    reader: Reader,
    head: int,
    offset: int,
    size: int,
    seen: set[int],
    name: str,
    losses: LossLog,
    node: int | None = None,
    first: int | None = None,
) -> Iterator[tuple[int, bytes]]:
    """
    Read the tasks on a list, one read each, starting from *node* or the first.

    On a running kernel a task may end between two reads, and its memory be reused for
    another task elsewhere on the list: the walk would skip all tasks in between. So
    ``prev`` of each node must be a node that was visited; else the walk goes back to
    the last one that is still on the list. If the list breaks off, a note is made and
    the tasks after that point are missing.

    :param offset: Offset of the list node in the task.
    :param size: Bytes of each task to read, its node among them.
    :param seen: Addresses of tasks to skip; the ones that are yielded are added.
    :param name: What the list is called in a note.
    :param first: The node before *node*, if the walk starts within the list.
    :return: Iterator of (address, bytes) of each task.
    """
    live = bool(reader.prog.flags & drgn.ProgramFlags.IS_LIVE)
    most = reader.once("tasks", lambda: _most_tasks(reader))
    trail = [head] if first is None else [head, first]
    visited = {*trail}
    resumed = again = 0
    try:
        if node is None:
            (node,) = U64.unpack(reader.read(head, 8))
        while node != head:
            address = node - offset
            new = address not in seen
            again += not new
            # The memory of a task that was visited may by now be that of a new one.
            looping = not new and (not live or again > len(seen))
            if not node or looping or len(seen) > most:
                raise DamagedDataError("it leads nowhere", node)
            data = reader.read(address, size)
            following, previous = LIST_HEAD.unpack_from(data, offset)
            if live and previous not in visited:
                resumed += 1
                losses.coverage["lists_resumed"] += 1
                if resumed > _MAX_RESUMED:
                    raise DamagedDataError("it changes too fast", node)
                node = _resume(reader, trail, visited)
                if node is None:
                    if first is not None:
                        return  # the process has ended
                    (node,) = U64.unpack(reader.read(head, 8))
                continue
            seen.add(address)
            if live:
                trail.append(node)
                visited.add(node)
            if new:
                yield address, data
            node = following
    except UNREADABLE as error:
        losses.lose(Loss.LISTS, f"{name} breaks off: {error}", about=name)


def _most_tasks(reader: Reader) -> int:
    """Return how many tasks there can be: each has a PID, and memory of its own."""
    size = drgn.sizeof(find_type(reader.prog, "struct task_struct"))
    return min(PID_MAX_LIMIT, reader.most(size))


def _resume(reader: Reader, trail: list[int], visited: set[int]) -> int | None:
    """Return the node after the last visited one that is still on its list.

    A node that has left the list has LIST_POISON2 as ``prev``.

    :return: ``None`` if none of them is still on the list.
    """
    while len(trail) > 1:
        following, previous = LIST_HEAD.unpack(reader.read(trail[-1], LIST_HEAD.size))
        if previous in visited:
            return int(following)
        trail.pop()
    return None
