# SPDX-License-Identifier: LGPL-2.1-or-later

"""The legend of msa-fleet."""

from msatools.legends.model import Entry, Group, Legend

COLUMNS = Group(
    "Columns",
    "column",
    (
        Entry("BUCKET", "fingerprint of the crash; dumps of one bug have the same"),
        Entry("COUNT", "number of dumps"),
        Entry("FIRST", "day of the first of them"),
        Entry("LAST", "day of the last of them"),
        Entry("HOSTS", "number of machines"),
        Entry("KERNELS", "number of kernel releases"),
        Entry("TREND", "dumps by day, or by some days, as bars"),
        Entry("WHAT", "cause and function of the crash, or the verdict"),
        Entry("DAY", "day of the crashes"),
        Entry("DUMPS", "number of dumps of a day"),
        Entry("NO REPORT", "why a dump has no report: failed, timeout, crashed"),
        Entry("PATH", "path of the dump"),
        Entry("WHY", "what went wrong with it"),
    ),
    where="header",
)

LEGEND: Legend = (COLUMNS,)
