# SPDX-License-Identifier: LGPL-2.1-or-later

"""The CPUs of a kernel."""

import drgn
from drgn.helpers.linux.cpumask import for_each_possible_cpu

from msatools.kernel.report import Findings


def possible_cpus(prog: drgn.Program, findings: Findings) -> list[int]:
    """List all CPUs that can ever be online; none, with a note, if they are lost."""
    try:
        return list(for_each_possible_cpu(prog))
    except drgn.FaultError as error:
        findings.lose("cpus", f"the list of CPUs is lost: {error}")
        return []
