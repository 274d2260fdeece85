# SPDX-License-Identifier: LGPL-2.1-or-later

"""Options that several commands share."""

import argparse
import pwd
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msatools.cli.command import argument
from msatools.cli.target_arguments import check_users
from msatools.cli.usage import UsageError
from msatools.cli.values import (
    cgroup_list,
    container_list,
    cpu_list,
    duration_ns,
    number_list,
    row_count,
    state_letters,
    user_list,
)

if TYPE_CHECKING:
    from msatools.target import Target
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
    help = "only tasks of these users, by number, or name on the running kernel"
    return _option("-u", dest="users", type=user_list, metavar="USER,...", help=help)


def uids(args: argparse.Namespace, target: "Target | None") -> tuple[int, ...] | None:
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
            "only tasks in these control groups or below, as in /proc/PID/cgroup; * "
            "and ? stand for parts of a name",
        ),
        _several(
            "--container",
            "containers",
            container_list,
            "ID",
            "only tasks in these containers, by 12 or more digits of the ID in the "
            "cgroup's path",
        ),
        _several(
            "--ns",
            "namespaces",
            number_list,
            "INODE",
            "only tasks in these namespaces of any kind, by inode number, as in "
            "/proc/PID/ns",
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


def cpus(help: str) -> argument:
    """Return the option that selects CPUs, or tasks by CPU."""
    help = f"{help}, such as 0-3,8"
    return _option("-P", dest="cpus", type=cpu_list, metavar="CPU-LIST", help=help)


def states() -> argument:
    """Return the option that selects tasks by state, as in /proc."""
    return _option(
        "--state",
        dest="states_wanted",
        type=state_letters,
        metavar="LETTERS",
        help="only tasks in these states, such as DZ",
    )


def min_age(help: str) -> argument:
    """Return the option for the minimum time that something has lasted.

    :param help: The beginning of the sentence: "only tasks that wait".
    """
    help = f"{help} for at least so long: 30 (seconds), 500ms, 5m, 2h, 1d"
    return _option(
        "--min-age",
        dest="min_age_ns",
        type=duration_ns,
        default=0,
        metavar="TIME",
        help=help,
    )


def columns(type: Callable[[str], Any], help: str = "") -> argument:
    """Return the option for the columns of a table.

    :param type: Parses the value: see :func:`msatools.cli.values.column_list`.
    :param help: What else there is to know.
    """
    help = f"show these columns{help}; all: all of them"
    return _option(
        "-o",
        dest="columns",
        type=type,
        action="extend",
        metavar="COL,...",
        help=help,
    )


def rows(help: str = "", default: int | None = None) -> argument:
    """Return the option for the maximum number of rows.

    :param help: What has the rows: " of each list".
    :param default: Maximum if the option is not given; ``None`` if the view decides.
    """
    usual = "" if default is None else f" ({default})"
    return _option(
        "-n",
        dest="rows",
        type=row_count,
        default=default,
        metavar="COUNT",
        help=f"show at most COUNT rows{help}{usual}; all: no limit",
    )


def textfile() -> argument:
    """Return the option for a file of metrics: see :mod:`msatools.cli.metrics`."""
    return _option(
        "--textfile",
        metavar="FILE",
        help="write gauges for node_exporter's textfile collector to FILE.prom, too",
    )


def view(name: str, help: str, flag: str | None = None) -> argument:
    """Return the option for a view, which sets ``args.view`` to its name.

    :param flag: The option, if it is not ``--NAME``.
    """
    flag = flag or f"--{name}"
    return _option(flag, dest="view", action="store_const", const=name, help=help)


def _option(flag: str, **words: Any) -> argument:
    return argument(flag, **words)
