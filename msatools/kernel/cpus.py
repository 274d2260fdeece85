# SPDX-License-Identifier: LGPL-2.1-or-later

"""The CPUs of a kernel.

drgn's own loops over CPUs go as far as a damaged number of CPUs says.
"""

import drgn
from drgn.helpers.linux.cpumask import cpu_online_mask, cpu_possible_mask

from msatools.kernel.cpumask import Cpus, mask_at
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog

_POSSIBLE = "msatools.possible CPUs"
"""Key of the program's cache."""


def possible_cpus(prog: drgn.Program, findings: LossLog) -> Cpus:
    """
    List all CPUs that can ever be online; none, with a note, if they are lost.

    They are known at boot, and looked for once a program.
    """
    known: Cpus | None = prog.cache.get(_POSSIBLE)
    if known is None:
        try:
            known = mask_at(Reader(prog), cpu_possible_mask(prog).value_())
        except drgn.FaultError as error:
            findings.lose(Loss.CPUS, f"the list of CPUs is lost: {error}")
            return ()
        prog.cache[_POSSIBLE] = known
    return known


def online_cpus(reader: Reader) -> Cpus:
    """List the CPUs that are online.

    :raises drgn.FaultError: if they are lost
    """
    return mask_at(reader, cpu_online_mask(reader.prog).value_())
