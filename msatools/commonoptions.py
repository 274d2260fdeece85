# SPDX-License-Identifier: LGPL-2.1-or-later

"""Options that several commands have, the same in each."""

from typing import Any

from drgn.commands import argument

from msatools.values import number_list, positive_number


def numbers(flag: str, dest: str, what: str, help: str) -> argument:
    """Make an option for the numbers of those that are wanted.

    :param what: What has such a number: "PID".
    """
    return _option(flag, dest=dest, type=number_list, metavar=f"{what},...", help=help)


def pids(help: str) -> argument:
    """Make the option for the tasks that are wanted."""
    return numbers("-p", "pids", "PID", help)


def uids() -> argument:
    """Make the option for the users whose tasks are wanted."""
    return numbers("-u", "uids", "UID", "of these users")


def rows(help: str) -> argument:
    """Make the option for the most rows to show."""
    return _option("-n", dest="rows", type=positive_number, metavar="COUNT", help=help)


def view(name: str, help: str, flag: str | None = None) -> argument:
    """Make the option for a view, of which ``args.view`` has the name.

    :param flag: If it is not ``--`` and the name.
    """
    flag = flag or f"--{name}"
    return _option(flag, dest="view", action="store_const", const=name, help=help)


def _option(flag: str, **words: Any) -> argument:
    # By drgn's annotations, this gives Any.
    made: argument = argument(flag, **words)
    return made
