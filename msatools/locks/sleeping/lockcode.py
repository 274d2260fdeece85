# SPDX-License-Identifier: LGPL-2.1-or-later

"""Code that refers to a lock: the owner of a static one need not keep its address.

On x86-64 the address of a static variable is part of the instruction that passes it to
the function that locks: as a constant of 32 bits, or as a distance from there.
"""

from collections.abc import Sequence

import numpy as np

from msatools.errors import UNREADABLE
from msatools.kernel.reader import Reader
from msatools.target.arch.x86_64 import START_KERNEL_MAP
from msatools.tasks.text import KernelText

_BYTES = 1024
"""Code before the current instruction of a function that is searched."""

_LOW = np.uint64((1 << 32) - 1)


def refers_to(
    reader: Reader, text: KernelText, pcs: Sequence[int], address: int
) -> bool:
    """Return whether the functions of a stack refer to a variable before they call.

    :param pcs: Addresses of code of the frames.
    :param address: Address of the variable.
    """
    if address < START_KERNEL_MAP:
        # No constant of 32 bits, nor near any code.
        return False
    return any(_refers(reader, text, pc, address) for pc in pcs)


def _refers(reader: Reader, text: KernelText, pc: int, address: int) -> bool:
    start = pc - _BYTES
    try:
        data, _ = reader.read_around_gaps(start, _BYTES, 8)
    except UNREADABLE:
        return False
    code = np.frombuffer(data, np.uint8).astype(np.uint64)
    last = len(code) - 3
    if last <= 0:
        return False
    words = sum(
        (code[shift : shift + last] << np.uint64(8 * shift) for shift in range(4)),
        np.zeros(last, np.uint64),
    )
    ends = np.uint64(start) + np.arange(4, last + 4, dtype=np.uint64)
    wanted = np.uint64(address) & _LOW
    found = (words == wanted) | ((words + ends) & _LOW == wanted)
    function = text.name(pc - 1)
    return any(
        text.name(start + at) == function for at in np.flatnonzero(found).tolist()
    )
