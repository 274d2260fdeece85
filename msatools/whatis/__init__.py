# SPDX-License-Identifier: LGPL-2.1-or-later

"""Find what lies at an address: msa-whatis.

``whatis`` tries the most specific answers first; ``words`` puts them into text.
"""

__all__ = (
    "model",
    "whatis",
)
