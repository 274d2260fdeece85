# SPDX-License-Identifier: LGPL-2.1-or-later

"""What happened to a kernel, and what is wrong with it: msa-report, on all domains.

``report`` reads all parts of a kernel once; ``rules`` judge them; ``log`` and ``crash``
read what the kernel left.
"""

__all__ = (
    "model",
    "report",
)
