# SPDX-License-Identifier: LGPL-2.1-or-later

"""Interrupts that CPUs of arm64 send each other (arch/arm64/kernel/smp.c).

They have numbers, descriptors and counts like those of devices, but /proc/interrupts
lists them as ``IPI0`` and so on.
"""

from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from msatools.cpus.counts import Counts, counts
from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.enums import enumerators
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Reader, column
from msatools.kernel.report import LossLog
from msatools.kernel.strings import read_string
from msatools.selfdesc.find import find_symbol, find_type, offset_of

_MOST = 16
_TEXT_SIZE = 64


class Ipis(Struct, frozen=True):
    """The interrupts by name; all empty except on arm64."""

    counts: Mapping[str, Counts]
    texts: Mapping[str, str]
    calls: str | None
    """Name of the interrupt for function calls."""


NO_IPIS = Ipis({}, {}, None)


def read_ipis(reader: Reader, percpu: PerCpu, losses: LossLog) -> Ipis:
    """Read how often each came to each CPU."""
    try:
        kinds = enumerators(reader.prog, "enum ipi_msg_type")
        # Since "arm64: Allow IPIs to be handled as normal interrupts" (in v5.10)
        array = find_symbol(reader.prog, "ipi_desc").address
        texts = find_symbol(reader.prog, "ipi_types").address
        offset = offset_of(find_type(reader.prog, "struct irq_desc"), "kstat_irqs")
    except MissingError:
        return NO_IPIS
    found: dict[str, Counts] = {}
    named: dict[str, str] = {}
    # Newer kernels have more than NR_IPI, and show them, too.
    count = min(kinds.get("MAX_IPI", kinds.get("NR_IPI", 0)), _MOST)
    try:
        descriptors = reader.words(array, count).tolist()
        names = reader.words(texts, count).tolist()
        for number, (descriptor, name) in enumerate(
            zip(descriptors, names, strict=True)
        ):
            if descriptor:
                (pointer,) = reader.words(descriptor + offset, 1).tolist()
                records, readable = reader.read_records(percpu.at(pointer), 4)
                key = f"IPI{number}"
                found[key] = counts(column(records, 0, 4).astype(np.int64), readable)
                named[key] = read_string(reader, name, _TEXT_SIZE)
    except UNREADABLE as error:
        losses.lose(Loss.COUNTS, f"interrupts between CPUs cannot be read: {error}")
        return NO_IPIS
    calls = kinds.get("IPI_CALL_FUNC")
    return Ipis(found, named, None if calls is None else f"IPI{calls}")
