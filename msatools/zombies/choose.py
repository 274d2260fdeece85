# SPDX-License-Identifier: LGPL-2.1-or-later

"""Select the requested part of a report of all zombies. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from msgspec.structs import replace

from msatools.tasks.membership import is_in_path
from msatools.zombies.exit_status import ending
from msatools.zombies.model import Zombie, ZombieGroup, ZombiesReport
from msatools.zombies.options import ZombiesOptions


def choose(report: ZombiesReport, options: ZombiesOptions) -> ZombiesReport:
    """
    Return the requested zombies, in their groups.

    The evidence of a group stays that of all the parent's children.
    """
    chosen = {one.pid: one for one in report.zombies if _is_wanted(one, options)}
    groups = [_part(group, chosen) for group in report.groups]
    left = [group for group in groups if group is not None]
    return replace(
        report,
        zombies=tuple(chosen.values()),
        groups=tuple(sorted(left, key=lambda group: (-group.count, group.ppid))),
        heirs=report.heirs if options.heirs else None,
        leaks=report.leaks if options.leaks else None,
        reads=report.reads if options.cost else None,
        read_bytes=report.read_bytes if options.cost else None,
        elapsed_ns=report.elapsed_ns if options.cost else None,
    )


def _is_wanted(zombie: Zombie, options: ZombiesOptions) -> bool:
    wanted: Sequence[tuple[Collection[object] | None, object]] = (
        (options.parents, zombie.ppid),
        (options.uids, zombie.uid),
        (options.verdicts, zombie.verdict),
    )
    if zombie.age_ns < options.min_age_ns:
        return False
    return is_in_path(options.membership, zombie.cgroup) and all(
        names is None or value in names for names, value in wanted
    )


def _part(group: ZombieGroup, chosen: dict[int, Zombie]) -> ZombieGroup | None:
    """Return the requested part of a group; ``None`` if it is empty."""
    dead = [chosen[pid] for pid in group.pids if pid in chosen]
    if len(dead) == len(group.pids):
        return group
    if not dead:
        return None
    ended = Counter(ending(zombie.exit_code) for zombie in dead)
    return replace(
        group,
        count=len(dead),
        min_age_ns=min(zombie.age_ns for zombie in dead),
        max_age_ns=max(zombie.age_ns for zombie in dead),
        exit_codes=dict(sorted(ended.items(), key=lambda item: (-item[1], item[0]))),
        uids=_known(zombie.uid for zombie in dead),
        cgroups=tuple(sorted({z.cgroup for z in dead if z.cgroup is not None})),
        namespaces=_known(zombie.namespace for zombie in dead),
        pids=[zombie.pid for zombie in dead],
        # The previous count of this part is unknown.
        delta=None,
    )


def _known(numbers: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(sorted({number for number in numbers if number is not None}))
