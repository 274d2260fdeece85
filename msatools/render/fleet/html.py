# SPDX-License-Identifier: LGPL-2.1-or-later

"""The buckets of a fleet as one page of HTML, which needs nothing besides.

Text from dumps is escaped twice: what is not printable as in a terminal, and by the
template engine, which escapes by default.
"""

from importlib.resources import files

from jinja2 import Environment

from msatools.fleet.model import FleetReport
from msatools.render.blocks import escape
from msatools.render.fleet.fleet import (
    LOST,
    bucket_name,
    bucket_text,
    day_counts,
    summary,
)

_TEMPLATE = "page.html.j2"

MAX_LOST = 1000
"""Dumps without a report on the page."""


def page(report: FleetReport, name: str) -> str:
    """Return the page.

    :param name: The folder of results.
    """
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["printable"] = escape
    environment.filters["name"] = bucket_name
    environment.filters["what"] = bucket_text
    source = files(__package__).joinpath(_TEMPLATE).read_text("utf-8")
    days = day_counts(report)
    text: str = environment.from_string(source).render(
        name=name,
        summary=summary(report),
        report=report,
        days=days,
        most=max((count for _, count in days), default=1) or 1,
        lost=report.lost[:MAX_LOST],
        notes=report.notes[:LOST],
        more_notes=max(len(report.notes) - LOST, 0),
        more_lost=max(len(report.lost) - MAX_LOST, 0),
    )
    return text
