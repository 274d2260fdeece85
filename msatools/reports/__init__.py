# SPDX-License-Identifier: LGPL-2.1-or-later

"""Read the reports of all commands from files, compare, encode and describe them.

``units`` formats quantities, ``schema`` describes models, ``diff`` compares two.
"""

__all__ = (
    "diff",
    "forms",
    "schema",
    "units",
)
