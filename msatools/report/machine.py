# SPDX-License-Identifier: LGPL-2.1-or-later

"""The machine that a report is of: its name, its build, and how long it ran."""

from collections.abc import Callable

import drgn
from drgn.helpers.linux.mm import totalram_pages
from drgn.helpers.linux.timekeeping import (
    ktime_get_coarse_boottime_ns,
    ktime_get_coarse_real_ns,
)

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.cpumask import online_cpus
from msatools.kernel.load import load_averages
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.report.crash import read_taints
from msatools.report.model import Machine
from msatools.selfdesc.find import ask, drgn_lookups, find_variable
from msatools.target.model import Target


def read_machine(reader: Reader, target: Target, losses: LossLog) -> Machine:
    """Read what is known of the machine; what cannot be read is ``None``."""
    prog = reader.prog

    def clock(read: Callable[[drgn.Program], drgn.Object]) -> int | None:
        try:
            return int(ask(read, prog).value_())
        except MissingError:
            return None
        except UNREADABLE as error:
            losses.lose(Loss.CLOCKS, f"the time cannot be read: {error}", about="now")
            return None

    try:
        ram: int | None = int(ask(totalram_pages, prog)) * target.page_size
    except LOST:
        ram = None
    return Machine(
        host=_name(prog, "nodename"),
        build=_name(prog, "version"),
        uptime_ns=clock(ktime_get_coarse_boottime_ns),
        time_ns=clock(ktime_get_coarse_real_ns),
        cpus=len(online_cpus(reader, losses)) or None,
        ram_bytes=ram,
        load=load_averages(prog, losses),
        taints=read_taints(reader, losses),
    )


def _name(prog: drgn.Program, member: str) -> str | None:
    try:
        with drgn_lookups:
            names = find_variable(prog, "init_uts_ns").name
            text: bytes = names.member_(member).string_()
    except LOST:
        return None
    return text.decode("utf-8", "backslashreplace")
