# SPDX-License-Identifier: LGPL-2.1-or-later

"""The functions of the package ``msatools`` itself."""

import os
from functools import cache

import drgn

from msatools.query.kernel import Kernel
from msatools.query.model import ChildTimes, Process, Thread
from msatools.target import TargetSpec, describe, open_target

_NAME = "msatools.query"
"""What answers for a program, in its cache."""


def open(
    target: str | os.PathLike[str] | TargetSpec | drgn.Program | None = None,
) -> Kernel:
    """
    Make a kernel ready to be asked.

    >>> kernel = msatools.open("vmcore")
    >>> kernel.process(1).timers.oncpu_usr.ns
    143208118

    :param target: A dump's path, or ``/proc/kcore``, which is what ``None`` means; a
        :class:`msatools.target.TargetSpec` for all else that commands can name; or a
        program that drgn has open.
    :raises TargetError: if it, or its types, cannot be had
    """
    if isinstance(target, drgn.Program):
        return _of(target)
    if not isinstance(target, TargetSpec):
        target = TargetSpec(path=None if target is None else os.fspath(target))
    return _of(open_target(target).prog)


def thread(tid: int) -> Thread:
    """Return one thread of the kernel at hand: see :meth:`Kernel.thread`.

    That is drgn's default program, if there is one, as at drgn's prompt; else the
    running kernel, which is opened once.
    """
    return _at_hand().thread(tid)


def process(pid: int) -> Process:
    """Return one process of the kernel at hand: see :meth:`Kernel.process`."""
    return _at_hand().process(pid)


def children(pid: int) -> ChildTimes:
    """Return the children that a process waited for: see :meth:`Kernel.children`."""
    return _at_hand().children(pid)


def self() -> Process:
    """Return the process that asks: see :meth:`Kernel.self`."""
    return _at_hand().self()


def _at_hand() -> Kernel:
    try:
        return _of(drgn.get_default_prog())
    except drgn.NoDefaultProgramError:
        return _running()


@cache
def _running() -> Kernel:
    return open()


def _of(prog: drgn.Program) -> Kernel:
    found: Kernel | None = prog.cache.get(_NAME)
    if found is None:
        # Where nothing serves its types, its own BTF is made to.
        describe(prog)
        found = prog.cache[_NAME] = Kernel(prog)
    return found
