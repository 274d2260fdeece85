# SPDX-License-Identifier: LGPL-2.1-or-later

"""Whether a report is incomplete, for the exit status with ``--strict``."""

from msatools.kernel.losses import spoils
from msatools.kernel.report import Report


def is_incomplete(report: Report) -> bool:
    """Return whether anything was lost, or the dump is truncated."""
    live = report.target.live
    lost = any(count and spoils(key, live) for key, count in report.coverage.items())
    return lost or report.target.truncated
