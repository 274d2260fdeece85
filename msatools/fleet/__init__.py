# SPDX-License-Identifier: LGPL-2.1-or-later

"""Many dumps: a report of each on Dask's workers, kept as Parquet, and their buckets.

It stands on the JSON of msa-report alone, which a process of its own prints for each
dump. Called by msa-fleet.
"""
