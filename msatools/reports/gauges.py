# SPDX-License-Identifier: LGPL-2.1-or-later

"""Gauges: numbers of a report, for monitoring."""

from collections.abc import Mapping

from msgspec import Struct


class Gauge(Struct, frozen=True, kw_only=True):
    """A number, or one for each value of some labels."""

    name: str
    """Starts with ``msatools_``, and ends in the unit if there is one: ``_bytes``."""

    help: str
    labels: tuple[str, ...] = ()
    values: Mapping[tuple[str, ...], float]
    """The numbers by the values of the labels; what is not known is not there."""


def single(name: str, help: str, value: float | None) -> Gauge:
    """Return a gauge of one number, which may not be known."""
    return Gauge(name=name, help=help, values={} if value is None else {(): value})
