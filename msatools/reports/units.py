# SPDX-License-Identifier: LGPL-2.1-or-later

"""Formats quantities and lists of CPUs for people."""

from collections.abc import Iterable

# --- Lists of CPU and node IDs, formatted as the kernel does.


def ranges(numbers: Iterable[int], most: int | None = None) -> str:
    """
    Format numbers as the kernel formats lists of CPUs.

    >>> ranges([3, 0, 1, 2, 8]), ranges([0, 2, 4, 5, 7, 9], most=3)
    ('0-3,8', '0,2,4-5 +2')

    :param most: Maximum number of ranges to write; of the others only the count of
        numbers is written.
    """
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    shown = found[:most]
    left = sum(last - first + 1 for first, last in found[len(shown) :])
    text = ",".join(f"{a}-{b}" if a != b else str(a) for a, b in shown)
    return text + (f" +{left:,}" if left else "")


# --- Formats quantities for people.


def size(amount: int) -> str:
    """
    Return a number of bytes in the largest unit that leaves a whole part.

    >>> size(889_192_448), size(12_345_678_848)
    ('848.0 MiB', '11.50 GiB')
    """
    kib, mib = amount / 1024, amount / 1024**2
    if abs(mib) < 1:
        return f"{kib:.0f} KiB"
    if abs(mib) < 1024:
        return f"{mib:.1f} MiB"
    if abs(mib) < 1024**2:
        return f"{mib / 1024:.2f} GiB"
    return f"{mib / 1024**2:.2f} TiB"


def short_size(amount: int) -> str:
    """
    Return a number of bytes in few characters.

    >>> short_size(5_242_880), short_size(12_345_678_848), short_size(4096)
    ('5.0M', '11.5G', '4K')
    """
    for unit, letter in ((1024**4, "T"), (1024**3, "G"), (1024**2, "M")):
        if amount >= unit:
            value = amount / unit
            return f"{value:.0f}{letter}" if value >= 99.95 else f"{value:.1f}{letter}"
    return f"{amount // 1024}K"


def count(number: int) -> str:
    """
    Return a count in few characters.

    >>> count(303), count(4125), count(142_959), count(12_000_000)
    ('303', '4.1K', '142K', '12.0M')
    """
    for unit, letter in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            tenths = number * 10 // unit
            whole = f"{tenths // 10}{letter}"
            return whole if tenths >= 1000 else f"{tenths / 10:.1f}{letter}"
    return str(number)


def duration(ns: int) -> str:
    """
    Return a duration to two or three figures.

    >>> duration(17_400_000), duration(35_512_000_000), duration(252 * 10**9)
    ('17ms', '35.5s', '4m12s')
    >>> duration(11_100 * 10**9), duration(187_200 * 10**9), duration(950)
    ('3h05m', '2d04h', '1us')
    """
    if ns < 0:
        return f"-{duration(-ns)}"
    if ns < 999_500:
        return f"{(ns + 500) // 1000}us"
    if ns < 999_500_000:
        return f"{(ns + 500_000) // 1_000_000}ms"
    seconds = ns / 10**9
    if seconds < 99.95:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole // 60 % 60:02}m"
    return f"{whole // 86400}d{whole // 3600 % 24:02}h"


def duration_range(least_ns: int, most_ns: int) -> str:
    """Return a range of two durations, or one if both look the same."""
    least, most = duration(least_ns), duration(most_ns)
    return least if least == most else f"{least}..{most}"


def clock(ns: int) -> str:
    """
    Return CPU time as minutes, seconds and hundredths, with hours if there are any.

    >>> clock(12_345_678_901), clock(7_384 * 10**9)
    ('0:12.34', '2:03:04')
    """
    hundredths = ns // 10**7
    minutes, rest = divmod(hundredths, 6000)
    if minutes < 60:
        return f"{minutes}:{rest // 100:02}.{rest % 100:02}"
    return f"{minutes // 60}:{minutes % 60:02}:{rest // 100:02}"


_SIGNALS = (
    *("HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1"),
    *("SEGV", "USR2", "PIPE", "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP"),
    *("TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH"),
    *("IO", "PWR", "SYS"),
)
"""Signals from 1 on, as on x86 and arm64 (include/uapi/asm-generic/signal.h)."""


def signal_name(number: int) -> str:
    """
    Return the name of a signal; real-time signals have numbers only.

    >>> signal_name(17), signal_name(34)
    ('SIGCHLD', 'signal 34')
    """
    if 0 < number <= len(_SIGNALS):
        return f"SIG{_SIGNALS[number - 1]}"
    return f"signal {number}"
