# SPDX-License-Identifier: LGPL-2.1-or-later

"""A run as msa-fleet's, in which some dumps hang or take memory without end.

``python -m tests.fleet.runner DUMPS RESULTS WORKERS``.
"""

import sys
from functools import partial

from msatools.fleet import run
from msatools.fleet.dumps import find_dumps
from msatools.fleet.run import Run
from msatools.fleet.single import Bounds, report_dump
from msatools.fleet.store import Results
from tests.fleet.program import PROGRAM

BOUNDS = Bounds(memory_bytes=2 << 30, seconds=300)


def main(folder: str, path: str, workers: str) -> None:
    """Run until all dumps of the folder are done."""
    results = Results(path)
    results.create()
    report = partial(report_dump, bounds=BOUNDS, program=PROGRAM)
    with run.local(int(workers), BOUNDS) as client:
        paths = [*find_dumps([folder])]
        print(Run(client, results, report, results.done()).run(paths))


if __name__ == "__main__":
    main(*sys.argv[1:])
