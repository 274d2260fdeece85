# SPDX-License-Identifier: LGPL-2.1-or-later

"""How many roots of waits say no more than where a task is asleep.

Over all dumps of the lab that are cached. A task that sleeps for a time, or for a
signal, does what its program asked for: that is a cause. Others are waits of the kernel
that no rule can name.
"""

from collections import Counter

from fixtures import lab
from msatools.locks.locks import collect_locks
from msatools.locks.report import Root
from msatools.locks.report_builder import LocksOptions
from msatools.tasks.waits import TaskClass, classify
from tests.report.judged import judged_dumps
from tests.support.dumps import open_dump

ASLEEP = "asleep in "
STACKS = LocksOptions(stacks=True)
ASKED_FOR = (TaskClass.TMR, TaskClass.SIG, TaskClass.POL)


def compare() -> None:
    """Print the share of the roots, and what they are."""
    names = [name for name in judged_dumps() if lab.cached(name)]
    roots, asleep, unnamed = 0, 0, Counter[str]()
    for name in names:
        report = collect_locks(open_dump(name, "btf"), options=STACKS)
        roots += len(report.roots)
        found = [root for root in report.roots if root.reason.startswith(ASLEEP)]
        asleep += len(found)
        unnamed.update(root.reason for root in found if not _asked_for(root))
    print(f"roots of waits of {len(names)} dumps: {roots}")
    print(f"  asleep in a function {_share(asleep, roots)}")
    print(f"  of these not for a time or a signal {_share(unnamed.total(), roots)}")
    for reason, count in unnamed.most_common():
        print(f"    {count:3} {reason}")


def _asked_for(root: Root) -> bool:
    return bool(root.stack) and classify(root.stack).task_class in ASKED_FOR


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.3f} ({part})" if whole else "-"


if __name__ == "__main__":
    compare()
