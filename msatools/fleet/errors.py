# SPDX-License-Identifier: LGPL-2.1-or-later

"""Errors of a fleet, with a text for the user."""

from importlib.util import find_spec


class FleetError(Exception):
    """Dumps, results or the cluster cannot be used; the text says what to do."""


def require(*modules: str) -> None:
    """Check that optional packages are installed.

    :raises FleetError: if one is missing
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise FleetError(
            f"{', '.join(missing)}: not installed; run pip install 'msatools[fleet]'"
        )
