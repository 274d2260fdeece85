# SPDX-License-Identifier: LGPL-2.1-or-later

"""Describes the object that a task waits on, and herds, in a few words."""

from collections.abc import Callable, Iterator

from msatools.locks.report import Herd, UserFrame, WaitTarget
from msatools.render.blocks import NOT_KEPT
from msatools.reports.units import count, duration, signal_name

# --- Text about the waker of a herd and its wake-ups, for all commands.


def woken_words(herd: Herd, interval_ns: int | None) -> Iterator[str]:
    """
    Yield the waker of a herd, the rate of wake-ups, and the share of futile ones.

    :param interval_ns: Interval of the report; ``None`` in a one-shot report.
    """
    waker = herd.waker
    by = f" by {waker.pid} {waker.comm}" if waker else ""
    if herd.woken:
        yield f"{herd.woken:,} being woken{by}"
    elif waker and herd.confidence != "none":
        # The waker is inferred from each thread's recent wakees.
        yield f"woken{by}, most likely"
    if waker and waker.frames:
        yield f"it stands in {' < '.join(map(_frame_words, waker.frames))}"
    if herd.wakeups and herd.in_vain is not None and interval_ns:
        rate = count(round(herd.wakeups * 1e9 / interval_ns))
        yield f"{rate} wake-ups a second, {100 * herd.in_vain:.0f} % needless"


def _frame_words(frame: UserFrame) -> str:
    """Return a frame: ``worker+0x1c (herd)``, ``herd+0x11c0``; a guess has a ``?``."""
    mark = "?" if frame.guess else ""
    module = frame.module or NOT_KEPT
    if frame.function is None:
        return f"{module}+{frame.offset:#x}{mark}"
    return f"{frame.function}+{frame.offset:#x}{mark} ({module})"


# --- Describes the object that a task waits on in a few words.


def on_text(on: WaitTarget) -> str:
    """
    Return a short description of the object that a task waits on.

    >>> on_text(WaitTarget(kind="pipe", inode=123))
    'pipe:[123]'
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
    names = (
        ",".join(map(signal_name, on.signals)) if few else f"{len(on.signals)} signals"
    )
    return _joined(names, _until(on))


def _stop(on: WaitTarget) -> str:
    return _joined("by", signal_name(on.signals[0])) if on.signals else "stopped"


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
