# SPDX-License-Identifier: LGPL-2.1-or-later

"""Import numpy without the threads that OpenBLAS starts for matrices.

OpenBLAS starts one thread fewer than there are CPUs when numpy is imported, and they
spin until they sleep: a tenth of a second of CPU on two cores, more on more. msatools
multiplies no matrices, and runs on machines that must not be disturbed.

The console scripts set the variable for their process, and all that these start inherit
it. drgn's prompt is the user's process, whose environment is passed on to whatever is
started there: it is set for the import alone. A program that uses msatools as a library
has its own way to import numpy, which stays its own.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE = "OPENBLAS_NUM_THREADS"


def allow_one_thread() -> None:
    """Let numpy have one thread in this process and its children, if no one chose."""
    os.environ.setdefault(_VARIABLE, "1")


@contextmanager
def one_thread() -> Iterator[None]:
    """Let numpy have one thread if it is imported in the block, if no one chose."""
    if "numpy" in sys.modules or _VARIABLE in os.environ:
        yield
        return
    os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
