# SPDX-License-Identifier: LGPL-2.1-or-later

"""What can be asked of msa-zombies."""

from dataclasses import dataclass

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

    namespaces: tuple[int, ...] | None = None
    """Those in these PID namespaces, by inode number, but not in those below."""

    uids: tuple[int, ...] | None = None
    verdicts: frozenset[Verdict] | None = None

    heirs: bool = False
    """Whether to tell who would inherit them if their parent died."""

    leaks: bool = False
    """Whether to look for struct pids with references that nobody can be named for."""

    cost: bool = False
    """Whether to tell how many reads the answer took."""
