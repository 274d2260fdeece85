# SPDX-License-Identifier: LGPL-2.1-or-later

"""What makes a report incomplete, for the exit status with ``--strict``."""

from msatools.kernel.report import Report

_LOST = ("_unreadable", "_broken", "_lost", "_incomplete")
# Of a running kernel, what belongs to tasks goes with them while it is read.
_LOST_LIVE = ("tasks_unreadable", "lists_broken", "run_queues_unreadable")


def has_lost(report: Report, endings: tuple[str, ...]) -> bool:
    """Tell whether something was lost.

    :param endings: How keys of the coverage end that count what is lost.
    """
    return any(
        count and key.endswith(endings) for key, count in report.coverage.items()
    )


def has_lost_tasks(report: Report) -> bool:
    """Tell whether a report on tasks lacks some, or a part of what they do."""
    return has_lost(report, _LOST_LIVE if report.target.live else _LOST)
