# SPDX-License-Identifier: LGPL-2.1-or-later

"""What no owner explains, on every dump that the lab has in its cache.

``python -m tests.memory.shares [NAME...]`` prints each with the largest of what is
left, the largest share first.
"""

import sys

from fixtures.lab.cache import default_cache
from msatools.errors import LOST
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport
from msatools.program import TargetError, TargetSpec, open_target

MOST = 0.003
"""Largest share of managed memory that may be unattributed."""

SHOWN = 4


def share_of(report: MemstatReport) -> float:
    """Return the share of managed memory that is unattributed."""
    (pages,) = (c.pages for c in report.classes if c.name == "kernel.unattributed")
    return pages / (report.managed_pages or 1)


def shares(names: list[str]) -> list[tuple[float, str, MemstatReport]]:
    """Return the share of each dump that is cached, the largest first."""
    found = []
    for path in sorted(default_cache().root.glob("run/*/vmcore*")):
        name = path.parent.name.rpartition("-")[0]
        if names and name not in names:
            continue
        try:
            opened = open_target(TargetSpec(path=str(path), types="btf"))
            report = collect_memstat(
                opened.prog, target=opened.target, unattributed=True
            )
        except (TargetError, *LOST) as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        found.append((share_of(report), name, report))
    return sorted(found, key=lambda each: -each[0])


def main() -> None:
    found = shares(sys.argv[1:])
    for share, name, report in found:
        mark = "  TOO MUCH" if share > MOST else ""
        print(f"{share:7.2%}  {name}{mark}")
        for group in (report.unattributed or ())[:SHOWN]:
            words = ", ".join(word.name for word in group.words[:2])
            order = "" if group.order is None else f" of order {group.order}"
            print(f"    {group.pages:7,} pages{order}: {group.content} {words}")
    over = sum(share > MOST for share, *_ in found)
    print(f"{len(found)} dumps, {over} over {MOST:.1%}")


if __name__ == "__main__":
    main()
