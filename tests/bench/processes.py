# SPDX-License-Identifier: LGPL-2.1-or-later

"""Whole processes, start to end, beside crash: this machine's, and the newest release.

The newest is Debian's package of it in sid, unpacked in the lab's cache with all
libraries that it needs: nothing of it is installed.
"""

import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from fixtures.lab import host
from fixtures.lab.cache import content_key, default_cache
from fixtures.lab.errors import LabError
from fixtures.lab.packages import extract
from fixtures.lab.suites import archive
from tests.bench.process import Usage, run_process
from tests.bench.timing import beside

Command = tuple[Sequence[object], str]
"""A command, and its input."""


def compare(elf: Path, vmlinux: Path, rounds: int) -> None:
    """Time msa-memstat and each crash in turn, and print medians, peaks and ratios."""
    host.require(["crash"])
    commands: dict[str, Command] = {}
    for crash in ([host.find("crash")], newest_crash()):
        if crash:
            words = [*crash, "-s", vmlinux, elf]
            commands[f"crash {_version(crash)} kmem -i"] = words, "kmem -i\nquit\n"
    memstat = Path(sys.executable).with_name("msa-memstat")
    ours = "msa-memstat"
    commands[ours] = [memstat, "-s", vmlinux, elf], ""
    used: dict[str, list[Usage]] = {name: [] for name in commands}
    for _, (name, (words, text)) in itertools.product(range(rounds), commands.items()):
        used[name].append(run_process(words, text))
    print(f"{'WHOLE PROCESS':34}{'seconds':>10}{'peak MiB':>12}{'msa-memstat':>14}")
    seconds = {
        name: statistics.median(usage.seconds for usage in usages)
        for name, usages in used.items()
    }
    # Those that are ahead of ours come first.
    for name, took in sorted(seconds.items(), key=lambda item: item[1]):
        peak = max(usage.peak_kib for usage in used[name])
        if name != ours:
            beside(ours, name, seconds[ours], took)
        ratio = f"{took / seconds[ours]:12.1f} x" if name != ours else ""
        print(f"{name:34}{took:10.2f}{peak / 1024:12.0f}{ratio:>14}")


def newest_crash() -> Sequence[object]:
    """Return the command that runs the crash of Debian sid; none if there is none.

    Its libraries are newer than this machine's: it runs with its own linker.
    """
    cache = default_cache()
    try:
        debian = archive("sid", "amd64", cache)
        packages = debian.closure(["crash"], ())
        files = debian.download("crash", packages)
    except LabError as error:
        print(f"no crash of Debian sid: {error}", file=sys.stderr)
        return []
    key = content_key(sorted(map(str, packages)))
    root = cache.entry("peer", "crash", key, lambda root: extract(files, root))
    libraries = root / "usr/lib/x86_64-linux-gnu"
    linker = libraries / "ld-linux-x86-64.so.2"
    return [linker, "--library-path", libraries, root / "usr/bin/crash"]


def _version(crash: Sequence[object]) -> str:
    """Return the version that ``crash --version`` begins with, such as ``8.0.2``."""
    words = host.run([str(word) for word in (*crash, "--version")], timeout=60).split()
    return words[words.index("crash") + 1] if "crash" in words else "?"
