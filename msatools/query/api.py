# SPDX-License-Identifier: LGPL-2.1-or-later

"""The functions of the package ``msatools`` itself."""

import os
from functools import cache

import drgn

from msatools.program import TargetSpec, describe, open_target
from msatools.query.kernel import Kernel, require_id
from msatools.query.model import ChildTimes, Process, Thread

_NAME = "msatools.query"
"""Key of the :class:`Kernel` in a program's cache."""


def open(
    target: str | os.PathLike[str] | TargetSpec | drgn.Program | None = None,
) -> Kernel:
    """
    Open a kernel for queries.

    >>> kernel = msatools.open("vmcore")
    >>> kernel.process(1).timers.oncpu_usr.ns
    143208118

    :param target: The path of a dump; ``/proc/kcore`` or ``None`` for the running
        kernel; a :class:`msatools.program.TargetSpec` for other targets of the
        commands; or an open program of drgn.
    :raises TargetError: if the target cannot be opened, or its types are not found
    """
    if isinstance(target, drgn.Program):
        return _of(target)
    if not isinstance(target, TargetSpec):
        target = TargetSpec(path=None if target is None else os.fspath(target))
    return _of(open_target(target).prog)


def thread(tid: int) -> Thread:
    """Return one thread of the default kernel: see :meth:`Kernel.thread`.

    The default kernel is drgn's default program, if there is one, as at drgn's prompt;
    else the running kernel, which is opened once.
    """
    require_id(tid)
    return _default_kernel().thread(tid)


def process(pid: int) -> Process:
    """Return one process of the default kernel: see :meth:`Kernel.process`."""
    require_id(pid)
    return _default_kernel().process(pid)


def children(pid: int) -> ChildTimes:
    """Return the reaped children of a process: see :meth:`Kernel.children`."""
    require_id(pid)
    return _default_kernel().children(pid)


def self() -> Process:
    """Return the calling process: see :meth:`Kernel.self`."""
    return _default_kernel().self()


def _default_kernel() -> Kernel:
    try:
        return _of(drgn.get_default_prog())
    except drgn.NoDefaultProgramError:
        return _running()


@cache
def _running() -> Kernel:
    return open()


def _of(prog: drgn.Program) -> Kernel:
    kernel: Kernel | None = prog.cache.get(_NAME)
    if kernel is None:
        # Without debug info, this makes the kernel's own BTF provide the types.
        describe(prog)
        kernel = prog.cache[_NAME] = Kernel(prog)
    return kernel
