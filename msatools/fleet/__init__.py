# SPDX-License-Identifier: LGPL-2.1-or-later

"""Many dumps: a report of each on Dask's workers, kept as Parquet, and their buckets.

It stands on the JSON of msa-report alone. ``run`` makes the reports, ``store`` keeps
them, ``buckets`` sorts them by what happened.
"""

__all__ = (
    "buckets",
    "run",
    "store",
)
