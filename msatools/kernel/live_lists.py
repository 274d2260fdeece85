# SPDX-License-Identifier: LGPL-2.1-or-later

"""Lists of tasks, which on a running kernel change while they are walked."""

import struct
from collections.abc import Iterator

import drgn

from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog

MAX_TASKS = 1 << 23
"""Twice PID_MAX_LIMIT (include/linux/threads.h): a longer walk is lost."""

_POINTER = struct.Struct("<Q")
_LINKS = struct.Struct("<QQ")
"""``struct list_head``: next, previous."""

_RESUMED = 256
"""How often one walk of a list that changes goes back to what is still on it."""


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
    Read the tasks on a list, one read each, from its first or from *node* on.

    On a running kernel a task may end between two reads, and another have its memory,
    which is somewhere else on the list: all in between would be missed. So each has to
    come after one that was passed, or the walk goes back to the last that is still
    there. A list that breaks off costs a note and what comes after.

    :param offset: Of the list's node in the task.
    :param size: Bytes of each task to read, its node among them.
    :param seen: Addresses of tasks that are not given again; those that are, are added.
    :param name: What the list is called in a note.
    :param first: What *node* comes after; without it the list has an end.
    :return: Iterator of (address, bytes) of each task.
    """
    live = bool(reader.prog.flags & drgn.ProgramFlags.IS_LIVE)
    trail = [head] if first is None else [head, first]
    passed = {*trail}
    resumed = again = 0
    try:
        if node is None:
            (node,) = _POINTER.unpack(reader.read(head, 8))
        while node != head:
            address = node - offset
            new = address not in seen
            again += not new
            # Memory of one that was passed may be that of a new task by now.
            looping = not new and (not live or again > len(seen))
            if not node or looping or len(seen) > MAX_TASKS:
                raise drgn.FaultError("it leads nowhere", node)
            data = reader.read(address, size)
            following, previous = _LINKS.unpack_from(data, offset)
            if live and previous not in passed:
                resumed += 1
                losses.coverage["lists_resumed"] += 1
                if resumed > _RESUMED:
                    raise drgn.FaultError("it changes too fast", node)
                node = _resume(reader, trail, passed)
                if node is None:
                    if first is not None:
                        return  # the process has ended
                    (node,) = _POINTER.unpack(reader.read(head, 8))
                continue
            seen.add(address)
            if live:
                trail.append(node)
                passed.add(node)
            if new:
                yield address, data
            node = following
    except drgn.FaultError as error:
        losses.lose(Loss.LISTS, f"{name} breaks off: {error}", about=name)


def _resume(reader: Reader, trail: list[int], passed: set[int]) -> int | None:
    """Tell what comes after the last that is still on its list, if one is.

    Who has left it has no previous one, and in the place of that a poison.
    """
    while len(trail) > 1:
        following, previous = _LINKS.unpack(reader.read(trail[-1], _LINKS.size))
        if previous in passed:
            return int(following)
        trail.pop()
    return None
