# SPDX-License-Identifier: LGPL-2.1-or-later

"""Describes the object that a task waits on in a few words."""

import signal
from collections.abc import Callable

from msatools.locks.base.model import WaitTarget
from msatools.reports.units import duration


def on_text(on: WaitTarget) -> str:
    """
    Return a short description of the object that a task waits on.

    >>> on_text(On(kind="pipe", inode=123)), on_text(On(kind="child", pid=12))
    ('pipe:[123]', 'pid 12')
    """
    write = _WRITERS.get(on.kind, _other)
    return write(on)


def _joined(*parts: str | None) -> str:
    return " ".join(part for part in parts if part)


def _address(on: WaitTarget) -> str | None:
    return None if on.address is None else f"{on.address:#x}"


def _device(on: WaitTarget) -> str | None:
    """Return the device's name, or its numbers without one; or the file system."""
    return on.device.split()[0] if on.device else on.fs


def _until(on: WaitTarget) -> str | None:
    if on.left_ns is None:
        return None
    sign = "+" if on.left_ns >= 0 else ""
    return f"until {sign}{duration(on.left_ns)}"


def _owner(on: WaitTarget) -> str | None:
    return None if on.owner is None else f"owner {on.owner}"


def _descriptor(on: WaitTarget) -> str | None:
    return None if on.fd is None else f"fd {on.fd}"


def _waiters(on: WaitTarget) -> str | None:
    if on.waiters is None or on.waiters < 2:
        return None
    return f"({on.waiters:,} waiters)"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _cpu(on: WaitTarget) -> str:
    return "cpu" if on.cpu is None else f"cpu{on.cpu}"


def _quota(on: WaitTarget) -> str:
    return _joined("quota of", on.path) if on.path else "quota"


def _futex(on: WaitTarget) -> str:
    if on.count is not None:
        return f"{on.count} futexes"
    place = _address(on)
    if place is None and on.inode is not None:
        place = f"inode {on.inode}"
    return _joined("futex", place, _owner(on), _waiters(on))


def _lock(on: WaitTarget) -> str:
    what = on.name or _address(on)
    whose = None if on.pid is None else f"of {on.pid}"
    if on.name == "pipe":
        what = f"pipe:[{on.inode}]"
    return _joined(on.type, what, on.path, whose, _owner(on), _waiters(on))


def _data(on: WaitTarget) -> str:
    where = on.path
    if where is None and on.inode is not None:
        where = f"inode {on.inode}"
    # Memory that is not in a file has only an address.
    whose = None if on.pid is None else f"of {on.pid}"
    known = _joined(where or _address(on), _device(on), whose)
    return known or on.kind


def _journal(on: WaitTarget) -> str:
    thread = None if on.pid is None else f"by {on.pid}"
    return _joined("journal", _device(on), thread, _waiters(on))


def _socket(on: WaitTarget) -> str:
    ends = _joined(on.local, f"-> {on.peer}" if on.peer else None)
    return _joined(f"socket:[{on.inode}]", on.type, ends)


def _pipe(on: WaitTarget) -> str:
    return on.path or f"pipe:[{on.inode}]"


def _poll(on: WaitTarget) -> str:
    if not on.count:
        return _until(on) or ("no fds" if on.count == 0 else "poll")
    if on.fds and len(on.fds) == 1:
        return _joined(f"fd {on.fds[0]}", _until(on))
    return _joined("1 fd" if on.count == 1 else f"{on.count:,} fds", _until(on))


def _child(on: WaitTarget) -> str:
    if on.pid is not None:
        return f"pid {on.pid}"
    return "any child" if on.pgid is None else f"children of group {on.pgid}"


def _timer(on: WaitTarget) -> str:
    return _until(on) or "a timer"


def _signals(on: WaitTarget) -> str:
    if not on.signals:
        return "any signal"
    few = len(on.signals) <= 3
    names = ",".join(map(_signal, on.signals)) if few else f"{len(on.signals)} signals"
    return _joined(names, _until(on))


def _stop(on: WaitTarget) -> str:
    return _joined("by", _signal(on.signals[0])) if on.signals else "stopped"


def _tracer(on: WaitTarget) -> str:
    return "a tracer" if on.pid is None else f"tracer {on.pid}"


def _file_lock(on: WaitTarget) -> str:
    where = on.path or (None if on.inode is None else f"inode {on.inode}")
    return _joined(on.kind, where, _owner(on))


def _numbered(on: WaitTarget) -> str:
    return _joined(on.kind, None if on.id is None else str(on.id), _until(on))


def _named(on: WaitTarget) -> str:
    """Return the path of a file, or its descriptor."""
    return on.path or _joined(on.kind, _descriptor(on))


def _other(on: WaitTarget) -> str:
    """Return kind, name and number of any other object."""
    return _joined(on.kind, on.path or _descriptor(on), _address(on), _until(on))


_WRITERS: dict[str, Callable[[WaitTarget], str]] = {
    "cpu": _cpu,
    "quota": _quota,
    "futex": _futex,
    "lock": _lock,
    "disk": _data,
    "page": _data,
    "file": _named,
    "device": _named,
    "tty": _named,
    "journal": _journal,
    "socket": _socket,
    "pipe": _pipe,
    "poll": _poll,
    "child": _child,
    "timer": _timer,
    "signals": _signals,
    "stop": _stop,
    "tracer": _tracer,
    "flock": _file_lock,
    "posix_lock": _file_lock,
    "msgqueue": _numbered,
    "semaphore": _numbered,
}
