# SPDX-License-Identifier: LGPL-2.1-or-later

"""What of a kernel and of this machine decides how it is read."""

import platform

import drgn

import msatools
from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.cpumask import kept_mask
from msatools.selfcheck.model import KernelFacts, Software
from msatools.selfcheck.report_set import ReportSet
from msatools.selfdesc.find import find_symbol, find_variable
from msatools.selfdesc.lookups import lookups
from msatools.target.arch import table_format
from msatools.tasks.stacks import StackCollector

_FEATURES = {
    "memcg": "root_mem_cgroup",
    "hugetlb": "hstates",
    "ksm": "ksm_pages_shared",
    "swap": "nr_swapfiles",
    "cpusets": "top_cpuset",
    "psi": "psi_system",
    "lockdep": "lock_classes",
    "page_owner": "page_owner_inited",
    "realtime": "rt_spin_lock",
}
"""Parts of a kernel, and a symbol that it has if it was built with them."""


def software() -> Software:
    """Return the versions of what msatools runs on."""
    return Software(
        msatools=msatools.__version__,
        drgn=drgn.__version__,
        python=platform.python_version(),
    )


def kernel_facts(reports: ReportSet) -> KernelFacts:
    """Return the facts of a kernel; call it last, as it lists all lookups."""
    form = table_format(reports.prog)
    known = lookups(reports.prog)
    collector = StackCollector(reports.reader, reports.losses)
    return KernelFacts(
        paging_levels=None if form is None else form.levels,
        unwinder="own" if collector.is_fast else "drgn",
        cpus_possible=_count(reports, "possible"),
        cpus_online=_count(reports, "online"),
        nodes_possible=_nodes(reports.prog),
        features={
            name: _has(reports.prog, symbol) for name, symbol in _FEATURES.items()
        },
        variables_missing=tuple(sorted(known.variables_missing)),
        members_missing=tuple(
            sorted(
                f"{type_}.{newest}"
                for (type_, newest), found in known.members.items()
                if found is None
            )
        ),
        members_older={
            f"{type_}.{newest}": found
            for (type_, newest), found in sorted(known.members.items())
            if found not in (None, newest)
        },
    )


def _count(reports: ReportSet, name: str) -> int | None:
    cpus = kept_mask(reports.reader, name, reports.losses)
    return None if cpus is None else len(cpus)


def _nodes(prog: drgn.Program) -> int | None:
    try:
        return int(find_variable(prog, "nr_node_ids").value_())
    except MissingError:
        return 1
    except UNREADABLE:
        return None


def _has(prog: drgn.Program, symbol: str) -> bool:
    try:
        find_symbol(prog, symbol)
    except MissingError:
        return False
    return True
