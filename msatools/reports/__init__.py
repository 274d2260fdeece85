# SPDX-License-Identifier: LGPL-2.1-or-later

"""Forms of the reports of all commands: read from files, compared, described.

``units`` formats quantities, ``schema`` describes models, ``diff`` compares two.
"""

__all__ = (
    "diff",
    "forms",
    "presented",
    "schema",
    "units",
)
