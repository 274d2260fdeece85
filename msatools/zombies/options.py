# SPDX-License-Identifier: LGPL-2.1-or-later

"""Options of msa-zombies."""

from msgspec import Struct

from msatools.tasks.membership import ANY, Membership
from msatools.zombies.model import Verdict


class ZombiesOptions(Struct, frozen=True, kw_only=True):
    """Contents of a report; ``None`` for all tasks.

    Limits and held memory are always of all zombies.
    """

    pids: tuple[int, ...] | None = None
    """PIDs of tasks, dead or alive, which are looked up directly."""

    parents: tuple[int, ...] | None = None
    """PIDs of parents whose children to report."""

    membership: Membership = ANY
    """Control groups, containers or namespaces. A dead task only has a PID and a user
    namespace. Tasks of nested namespaces are not included."""

    uids: tuple[int, ...] | None = None
    min_age_ns: int = 0
    """Minimum time since they died."""

    verdicts: frozenset[Verdict] | None = None

    heirs: bool = False
    """Whether to report who would inherit them if their parent died."""

    leaks: bool = False
    """Whether to search for each struct pid with unexplained references."""

    cost: bool = False
    """Whether to report the number of reads."""
