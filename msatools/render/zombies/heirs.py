# SPDX-License-Identifier: LGPL-2.1-or-later

"""Who would inherit the dead if their parent died, as trees."""

from collections import Counter
from collections.abc import Iterator

from msatools.render.blocks import Block, Span, Tree, text
from msatools.render.locks.words import more
from msatools.render.zombies.words import process_text, zombies_text
from msatools.zombies.model import Heir, ZombiesReport

_PARENTS = 25
_REAPS = {
    True: "reaps its dead",
    False: "does not reap its dead",
    None: "whether it reaps its dead is not known",
}


def heirs_tree(
    report: ZombiesReport, rows: int | None, verbose: bool
) -> Iterator[Block]:
    """Yield heirs, and under each the parents whose dead it would inherit."""
    if not report.heirs:
        yield text("Who would inherit them is not known.")
        return
    counts: Counter[int] = Counter()
    for group in report.groups:
        counts[group.ppid] += group.count
    ranked = sorted(report.heirs, key=lambda heir: -counts[heir.ppid])
    shown = ranked[:rows] if rows or verbose else ranked[:_PARENTS]
    names = {group.ppid: group.parent_comm for group in report.groups}
    below: dict[int | None, list[Heir]] = {}
    for heir in shown:
        below.setdefault(heir.heir, []).append(heir)
    for pid, heirs in below.items():
        label = "no heir"
        if pid is not None:
            label = f"{process_text(pid, heirs[0].heir_comm)}  {_REAPS[heirs[0].reaps]}"
        children = []
        for heir in heirs:
            parent = process_text(heir.ppid, names.get(heir.ppid))
            why = heir.why if pid is None else f"its heir: {heir.why}"
            children.append(Tree(f"{parent}  {zombies_text(counts[heir.ppid])}  {why}"))
        yield Tree(Span(label, "title"), tuple(children))
    yield from more(len(ranked) - len(shown), "parent")
