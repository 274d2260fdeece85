# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the commands cost the machine that they run on, measured inside of a guest.

The guest is emulated, and an emulated CPU runs our Python some 15 times as slow as the
host's would: times are long, and ratios are what counts.
"""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from fixtures import lab
from fixtures.lab.guest.livecommands import NAMES
from fixtures.lab.inside import RESULTS
from tests.bench.timing import beside

KERNELS = ("6.1", "6.12")
MIB = 1 << 20
PS = "ps -eLo ..."
WINDOW_NS = 30 * 10**9
"""No stretch so long has more of a CPU than ``--budget`` allows, and a point."""


def compare() -> None:
    """Print what was measured when the guests of each kernel were built."""
    for kernel in KERNELS:
        run = lab.build(f"watching-{kernel}")
        facts = _facts(run)
        _samples(run.release, facts)
        print()
        _watching(run.release, facts)
        print()
        _kept(run.release, facts)
        print()
        run = lab.build(f"rates-{kernel}")
        _reads(run.release, _facts(run))
        print()


def _facts(run: lab.Run) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((run.directory / RESULTS).read_text())
    return facts


def _samples(release: str, facts: Mapping[str, Any]) -> None:
    print(f"A SAMPLE OF AN IDLE GUEST, {release}")
    print(
        f"{'':16}{'first answer':>14}{'sample':>12}{'CPU':>12}{'of ps':>9}"
        f"{'reads':>10}{'peak':>12}"
    )
    for name in NAMES:
        # With the first one all is learnt that holds for the others.
        samples = facts[name]["idle"][1:]
        cpu_ns = _median(samples, "cpu_ns")
        ps_s = statistics.median(facts[name]["ps"])
        beside(f"a sample of msa-{name}, {release}", PS, cpu_ns / 1e9, ps_s)
        print(
            f"msa-{name:12}{facts[name]['answer']['seconds']:12.1f} s"
            f"{_median(samples, 'elapsed_ns') / 1e6:9.0f} ms"
            f"{cpu_ns / 1e6:9.0f} ms"
            f"{cpu_ns / 1e9 / ps_s:7.1f} x"
            f"{statistics.median(s['coverage']['reads'] for s in samples):10,.0f}"
            f"{max(s['peak_bytes'] for s in samples) / MIB:8.0f} MiB"
        )
    ps_s = statistics.median(s for name in NAMES for s in facts[name]["ps"])
    print(f"{PS:42}{1e3 * ps_s:9.0f} ms")


def _watching(release: str, facts: Mapping[str, Any]) -> None:
    print(f"WHAT A BUSY GUEST LOSES WHILE IT IS SAMPLED ONCE A SECOND, {release}")
    print(f"({facts['online']} CPUs, both busy; work done a second, in turns)")
    print(f"{'':28}{'alone':>10}{'watched':>10}{'lost':>9}{'from':>7}{'to':>7}", end="")
    print(f"{'its CPU':>10}")
    for name in NAMES:
        print(_lost(f"msa-{name}", facts[name]["busy"]))
    print(_lost(PS, facts["ps"]))
    _, by_ps, _ = _shares_lost(facts["ps"])
    for name in NAMES:
        _, by_ours, _ = _shares_lost(facts[name]["busy"])
        # What is lost to either may be within what the host's other work takes.
        if by_ours > 0 and by_ps > 0:
            beside(f"work lost to msa-{name}, {release}", PS, by_ours, by_ps)


def _lost(what: str, found: Mapping[str, Any]) -> str:
    """Return the row of what is lost: the median, and from where to where it goes."""
    alone, watched = found["alone"], found["watched"]
    least, median, most = _shares_lost(found)
    share = statistics.median(found["used"]) / found["seconds"]
    return (
        f"{what:28}{statistics.median(alone):10.0f}{statistics.median(watched):10.0f}"
        f"{100 * median:7.1f} %{100 * least:7.1f}"
        f"{100 * most:7.1f}{100 * share:8.1f} %"
    )


def _shares_lost(found: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the least, the median and the most of the work that is lost, as shares.

    Each window is held against those just before and after it: the host has other work.
    """
    lost = [
        1 - between / statistics.mean(around)
        for between, around in zip(
            found["watched"], pairwise(found["alone"]), strict=True
        )
    ]
    return min(lost), statistics.median(lost), max(lost)


def _kept(release: str, facts: Mapping[str, Any]) -> None:
    print(f"THE MOST OF A CPU IN ANY 30 s, FROM THE FIRST LOOK ON, {release}")
    for name in NAMES:
        words, samples = facts[name]["kept"]
        what = f"{f'msa-{name} {words}':28}"
        # What the first look has cost is made up for before there is a sample.
        made = f"{100 * max(_shares(samples)):8.1f} %" if samples else "no sample yet"
        print(f"{what}{made}")


def _shares(samples: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    """Yield the share of a CPU in each window that begins with a sample.

    What a sample took counts whole, wherever in its time it was taken.
    """
    for first in range(len(samples)):
        cpu_ns = wall_ns = 0
        for sample in samples[first:]:
            cpu_ns += sample["cpu_ns"]
            wall_ns += sample["wall_ns"]
            if wall_ns >= WINDOW_NS:
                break
        yield cpu_ns / max(wall_ns, WINDOW_NS)


def _reads(release: str, reads: Mapping[str, Any]) -> None:
    print(f"READING /proc/kcore OF 16 GiB, {release}")
    size = reads["bytes"]
    for piece, seconds in reads["pieces"].items():
        rate = size / seconds / MIB
        what = f"all struct pages, {int(piece) // 1024:,} KiB a read"
        print(f"{what:44}{rate:10.0f} MiB/s")
    for few, seconds in reads["few"].items():
        what = f"here and there, {int(few):,} bytes a read"
        print(f"{what:44}{1e6 * seconds / 5000:10.1f} us a read")
    flags, memstat = (
        statistics.median(reads[key]) for key in ("kpageflags", "memstat")
    )
    beside(f"msa-memstat's report, {release}", "/proc/kpageflags", memstat, flags)
    pages = reads["pages"]
    print(f"{'/proc/kpageflags, all of it':44}{pages / flags / 1e6:10.2f} Mpages/s")
    print(
        f"{'msa-memstat, all of its report':44}{pages / memstat / 1e6:10.2f} Mpages/s"
        f"   {flags / memstat:.2f} x its rate"
    )


def _median(samples: Iterable[Mapping[str, Any]], key: str) -> float:
    return statistics.median(sample[key] for sample in samples)
