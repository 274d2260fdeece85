# SPDX-License-Identifier: LGPL-2.1-or-later

"""``--textfile``: gauges for the textfile collector of node_exporter.

Each file is replaced by a rename, as node_exporter may read it at any time. Only gauges
in base units, and labels with few values: what a report has names of goes into reports.
"""

import argparse
from collections.abc import Iterable
from importlib.util import find_spec

from msatools.cli.output import OutputError, check_writable, replace_file
from msatools.reports.gauges import Gauge


def check_textfile(path: str) -> None:
    """Check that metrics can be made and written, before anything is read.

    :raises OutputError: if they cannot
    """
    if not path.endswith(".prom"):
        raise OutputError(
            f"{path}: node_exporter reads only files that end in .prom; name one"
        )
    check_writable(path)
    if find_spec("prometheus_client") is None:
        raise OutputError(
            f"{path}: prometheus_client is missing, which makes metrics; run pip "
            "install 'msatools[metrics]'"
        )


def textfile_complaint(args: argparse.Namespace) -> str | None:
    """Return why metrics cannot be written with the other arguments, if so."""
    # Inside drgn there is no sandbox.
    if args.textfile is not None and getattr(args, "sandbox", False):
        return "--textfile: no file is written with --sandbox"
    return None


def write_textfile(path: str, gauges: Iterable[Gauge]) -> None:
    """Write gauges to a file.

    :raises OutputError: if it cannot be written
    """
    replace_file(path, exposition(gauges))


def exposition(gauges: Iterable[Gauge]) -> bytes:
    """Return gauges in Prometheus's text format; those without a value are left out."""
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    for gauge in gauges:
        made = prometheus_client.Gauge(
            gauge.name, gauge.help, gauge.labels, registry=registry
        )
        for labels, value in gauge.values.items():
            (made.labels(*labels) if gauge.labels else made).set(value)
    return prometheus_client.generate_latest(registry)
