# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the commands cost the machine that they run on, measured inside of a guest.

The guest is emulated, and an emulated CPU runs our Python some 15 times as slow as the
host's would: times are long, and ratios are what counts.
"""

import json
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from fixtures import lab
from fixtures.lab.inside import RESULTS

KERNELS = ("6.1", "6.12")
NAMES = ("memstat", "prstat", "locks", "zombies", "cpus")
MIB = 1 << 20


def compare() -> None:
    """Print what was measured when the guest of each kernel was built."""
    for kernel in KERNELS:
        run = lab.build(f"watching-{kernel}")
        facts = json.loads((run.directory / RESULTS).read_text())
        _samples(run.release, facts)
        print()
        _watching(run.release, facts)
        print()
        _reads(run.release, facts["reads"])
        print()


def _samples(release: str, facts: Mapping[str, Any]) -> None:
    print(f"A SAMPLE OF AN IDLE GUEST, {release}")
    print(
        f"{'':16}{'first answer':>14}{'sample':>12}{'CPU':>12}{'reads':>10}{'peak':>12}"
    )
    for name in NAMES:
        # With the first one all is learnt that holds for the others.
        samples = facts[name]["idle"][1:]
        print(
            f"msa-{name:12}{facts[name]['answer']['seconds']:12.1f} s"
            f"{_median(samples, 'elapsed_ns') / 1e6:9.0f} ms"
            f"{_median(samples, 'cpu_ns') / 1e6:9.0f} ms"
            f"{statistics.median(s['coverage']['reads'] for s in samples):10,.0f}"
            f"{max(s['peak_bytes'] for s in samples) / MIB:8.0f} MiB"
        )


def _watching(release: str, facts: Mapping[str, Any]) -> None:
    print(f"WHAT A BUSY GUEST LOSES WHILE IT IS SAMPLED ONCE A SECOND, {release}")
    print(f"({facts['online']} CPUs, both busy; work done a second)")
    print(f"{'':28}{'alone':>10}{'watched':>10}{'lost':>9}{'our CPU':>10}")
    for name in NAMES:
        for words, found in facts[name]["busy"].items():
            alone, watched = statistics.mean(found["alone"]), found["watched"]
            samples = found["samples"][1:] or found["samples"]
            shares = _sum(samples, "cpu_ns") / _sum(samples, "wall_ns")
            print(
                f"{f'msa-{name} {words}':28}{alone:10.0f}{watched:10.0f}"
                f"{100 * (1 - watched / alone):7.1f} %{100 * shares:8.1f} %"
            )


def _reads(release: str, reads: Mapping[str, Any]) -> None:
    print(f"READING /proc/kcore, {release}")
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
    pages = reads["pages"]
    print(f"{'/proc/kpageflags, all of it':44}{pages / flags / 1e6:10.2f} Mpages/s")
    print(
        f"{'msa-memstat, all of its report':44}{pages / memstat / 1e6:10.2f} Mpages/s"
        f"   {memstat / flags:.2f} x"
    )


def _median(samples: Iterable[Mapping[str, Any]], key: str) -> float:
    return statistics.median(sample[key] for sample in samples)


def _sum(samples: Iterable[Mapping[str, Any]], key: str) -> int:
    return sum(sample[key] for sample in samples)
