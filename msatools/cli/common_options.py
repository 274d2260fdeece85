# SPDX-License-Identifier: LGPL-2.1-or-later

"""Options that several commands share."""

import argparse
import pwd
from typing import TYPE_CHECKING, Any

from drgn.commands import argument

from msatools.cli.arguments import UsageError, check_users
from msatools.cli.values import (
    cgroup_list,
    container_list,
    number_list,
    row_count,
    user_list,
)
from msatools.target import Target

if TYPE_CHECKING:
    from msatools.tasks.membership import Membership


def numbers(flag: str, dest: str, what: str, help: str) -> argument:
    """Return an option that selects by ID.

    :param what: Kind of ID: "PID".
    """
    return _option(flag, dest=dest, type=number_list, metavar=f"{what},...", help=help)


def pids(help: str) -> argument:
    """Return the option that selects tasks by PID."""
    return numbers("-p", "pids", "PID", help)


def users() -> argument:
    """Return the option that selects tasks by user: see :func:`uids`."""
    help = "of these users, by number; by name, too, of the running kernel"
    return _option("-u", dest="users", type=user_list, metavar="USER,...", help=help)


def uids(args: argparse.Namespace, target: Target | None) -> tuple[int, ...] | None:
    """Return the UIDs of the option of :func:`users`; ``None`` if it was not given.

    :param target: ``None`` for a recording.
    :raises UsageError: if a user does not exist, or the target is not this machine
    """
    if args.users is None:
        return None
    check_users(args, is_own=target is not None and target.kind == "kcore")
    return tuple(map(_uid, args.users))


def _uid(user: int | str) -> int:
    if isinstance(user, int):
        return user
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise UsageError(f"-u {user}: this machine has no user of that name") from None


def memberships() -> tuple[argument, ...]:
    """Return the options that select tasks by cgroup, container and namespace."""
    return (
        _several(
            "--cgroup",
            "cgroups",
            cgroup_list,
            "PATH",
            "in these control groups, as in /proc/PID/cgroup, or below; * and ? stand "
            "for parts of a name",
        ),
        _several(
            "--container",
            "containers",
            container_list,
            "ID",
            "in these containers, by 12 or more digits of the ID in the cgroup's path",
        ),
        _several(
            "--ns",
            "namespaces",
            number_list,
            "INODE",
            "in these namespaces of any kind, by inode number, as in /proc/PID/ns",
        ),
    )


def membership(args: argparse.Namespace) -> "Membership":
    """Return the values of the options of :func:`memberships`."""
    from msatools.tasks.membership import Membership

    return Membership(
        cgroups=_given(args.cgroups),
        containers=_given(args.containers),
        namespaces=_given(args.namespaces),
    )


def _several(flag: str, dest: str, type: Any, what: str, help: str) -> argument:
    """Return an option with a list, which may be repeated."""
    return _option(
        flag,
        dest=dest,
        type=type,
        action="extend",
        default=[],
        metavar=f"{what},...",
        help=help,
    )


def _given(values: list[Any]) -> tuple[Any, ...] | None:
    return tuple(values) if values else None


def rows(help: str) -> argument:
    """Return the option for the maximum number of rows."""
    help = f"{help}; all: no limit"
    return _option("-n", dest="rows", type=row_count, metavar="COUNT", help=help)


def view(name: str, help: str, flag: str | None = None) -> argument:
    """Return the option for a view, which sets ``args.view`` to its name.

    :param flag: The option, if it is not ``--NAME``.
    """
    flag = flag or f"--{name}"
    return _option(flag, dest="view", action="store_const", const=name, help=help)


def _option(flag: str, **words: Any) -> argument:
    # drgn's annotations make this Any.
    option: argument = argument(flag, **words)
    return option
