# SPDX-License-Identifier: LGPL-2.1-or-later

"""Report on many dumps with Dask, store results as Parquet, and group them by bug.

The only input is the JSON of msa-report. ``run`` makes the reports, ``store`` keeps
them, ``buckets`` groups dumps that are most likely of one bug.
"""

__all__ = (
    "buckets",
    "run",
    "store",
)
