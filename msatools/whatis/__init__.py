# SPDX-License-Identifier: LGPL-2.1-or-later

"""What lies at an address: msa-whatis.

``whatis`` goes from the most specific answer to the least; ``words`` says it.
"""

__all__ = (
    "model",
    "whatis",
)
