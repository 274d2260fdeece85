# SPDX-License-Identifier: LGPL-2.1-or-later

"""How right msa-report's verdicts are, over all dumps of the lab.

``python -m tests.bench.verdicts`` takes those that are cached; with ``--build`` all,
and each is judged as soon as it is built: the cache need not have room for all at once.

Precision: of the codes said, the share that is right. Recall: of the codes that had to
be said, the share that was said. Led: of the dumps in which something is wrong, the
share whose first page has all of it, with the words that name the cause: in full, or in
short below them.
"""

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fixtures import lab
from msatools.render.report.report import VERDICTS, page_parts
from tests.report.expected import SCENARIOS, Expected
from tests.report.judged import judged, judged_dumps, report_of


def compare(*, build: bool = False) -> None:
    """Print precision and recall, of all verdicts and of critical ones.

    :param build: Whether to build the dumps that are not cached.
    """
    names = judged_dumps()
    sums: Counter[str] = Counter()
    dumps, led, troubled = 0, 0, 0
    for dump in names:
        if build:
            lab.build(dump)
        elif not lab.cached(dump):
            continue
        dumps += 1
        found = judged(dump)
        sums["said"] += len(found.said)
        sums["right"] += len(found.right)
        sums["missed"] += len(found.missed)
        sums["critical said"] += len(found.critical_said)
        sums["critical right"] += len(found.critical_right)
        sums["critical missed"] += len(found.critical_missed)
        expected = SCENARIOS[dump.rpartition("-")[0]]
        if expected.died or expected.critical or expected.must:
            troubled += 1
            is_led = _is_on_first_page(expected, report_of(dump)["verdicts"])
            led += is_led and not found.missed and not found.failed
            if not is_led:
                print(f"  {dump}: not on the first page")
        wrong = [
            *(f"not so: {code}" for code in sorted(found.said - found.right)),
            *(f"not said: {code}" for code in sorted(found.missed)),
            *(
                f"not critical: {code}"
                for code in sorted(found.critical_said - found.critical_right)
            ),
            *found.failed,
        ]
        for line in wrong:
            print(f"  {dump}: {line}")
    print(f"verdicts of {dumps} dumps of {len(names)}")
    print(f"  led      {_share(led, troubled)} ({led} of {troubled} dumps in trouble)")
    for label, prefix in (("all", ""), ("critical", "critical ")):
        said, right = sums[f"{prefix}said"], sums[f"{prefix}right"]
        missed = sums[f"{prefix}missed"]
        print(
            f"  {label:8} precision {_share(right, said)}, recall "
            f"{_share(right, right + missed)} ({said} said, {missed} missed)"
        )


def _is_on_first_page(
    expected: Expected, verdicts: Sequence[Mapping[str, Any]]
) -> bool:
    """Return whether what has to be said stands there, with the words of the cause."""
    codes = [verdict["code"] for verdict in verdicts]
    shown: dict[str, str] = {}
    full, short = page_parts(codes, VERDICTS)
    for index in full:
        shown[codes[index]] = shown.get(codes[index], "") + json.dumps(verdicts[index])
    for index, *_ in short:
        # A line has the text of the first of them, without evidence.
        text = json.dumps(verdicts[index]["text"])
        shown[codes[index]] = shown.get(codes[index], "") + text
    return expected.must | expected.critical <= shown.keys() and all(
        words in shown.get(code, "") for code, words in expected.words.items()
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else "-"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.bench.verdicts")
    parser.add_argument("--build", action="store_true", help="build what is not cached")
    compare(build=parser.parse_args().build)
