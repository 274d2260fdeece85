# SPDX-License-Identifier: LGPL-2.1-or-later

"""What can be asked of msa-zombies."""

from dataclasses import dataclass

from msatools.tasks.membership import ANY, Membership
from msatools.zombies.model import Verdict


@dataclass(frozen=True, kw_only=True)
class ZombiesOptions:
    """What a report is to have; ``None`` is all.

    Limits and what is held are those of all zombies, whichever are asked for.
    """

    pids: tuple[int, ...] | None = None
    """These tasks alone, looked up directly, dead or alive."""

    parents: tuple[int, ...] | None = None
    """Children of these processes."""

    membership: Membership = ANY
    """Those in these control groups, containers or namespaces. A dead task is in a PID
    and a user namespace only; in these, but not in those below."""

    uids: tuple[int, ...] | None = None
    verdicts: frozenset[Verdict] | None = None

    heirs: bool = False
    """Whether to tell who would inherit them if their parent died."""

    leaks: bool = False
    """Whether to look for struct pids with references that nobody can be named for."""

    cost: bool = False
    """Whether to tell how many reads the answer took."""
