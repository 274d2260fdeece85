# SPDX-License-Identifier: LGPL-2.1-or-later

"""Options of msa-report."""

from msgspec import Struct


class ReportOptions(Struct, frozen=True, kw_only=True):
    """What to read."""

    crash_only: bool = False
    """Read only what is needed to know how the kernel crashed."""

    keep_parts: bool = False
    """Keep the reports of all commands."""

    memory_map: bool = False
    """Make a map of memory."""

    stacks: bool = False
    """Keep the stacks of all threads, too."""

    unconfined: bool = False
    """Whether the dump is read outside of the sandbox for want of seccomp."""
