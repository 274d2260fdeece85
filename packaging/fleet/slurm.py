#!/usr/bin/env python3
# SPDX-License-Identifier: LGPL-2.1-or-later

"""Start a Dask cluster for msa-fleet on Slurm, and run until Ctrl-C.

It needs dask-jobqueue beside msatools[fleet]. For PBS, LSF, SGE and others, name their
class of dask_jobqueue in place of SLURMCluster.

    packaging/fleet/slurm.py --jobs 20 --partition batch
    msa-fleet run /lustre/crash -o results --scheduler ADDRESS  # which it prints
"""

import argparse
import time

from dask_jobqueue import SLURMCluster


def main() -> None:
    """Start the jobs, print the scheduler's address, and wait."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=10, help="jobs, of 8 workers each")
    parser.add_argument("--partition", help="of Slurm")
    parser.add_argument("--walltime", default="08:00:00", help="of each job")
    args = parser.parse_args()
    with SLURMCluster(
        queue=args.partition,
        cores=8,
        processes=8,
        # Each dump may take 4 GiB (msa-fleet run --memory).
        memory="40GiB",
        walltime=args.walltime,
    ) as cluster:
        cluster.scale(jobs=args.jobs)
        print(cluster.scheduler_address, flush=True)
        while True:
            time.sleep(60)


if __name__ == "__main__":
    main()
