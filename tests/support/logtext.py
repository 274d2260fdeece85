# SPDX-License-Identifier: LGPL-2.1-or-later

"""The log of a dump as the texts that programs make of it."""

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta, timezone

from msatools.program.description import LogRecord

HOST = "web7"
START = datetime(2026, 11, 28, 2, 21, 40, 250_000, timezone.utc)
"""When the kernel started."""

_NAMES = ("emerg", "alert", "crit", "err", "warn", "notice", "info", "debug")


def seconds(record: LogRecord) -> str:
    whole, rest = divmod(record.time_ns // 1000, 1_000_000)
    return f"{whole:5}.{rest:06}"


def stamp(record: LogRecord) -> str:
    return f"[{seconds(record)}] "


def day(record: LogRecord) -> datetime:
    return START + timedelta(microseconds=record.time_ns // 1000)


def caller(record: LogRecord) -> str:
    who = f"C{record.cpu}" if record.tid is None else f"T{record.tid}"
    return f"[{who:>6}]"


def dmesg(record: LogRecord) -> str:
    return f"{stamp(record)}{record.text}"


def with_dates(record: LogRecord) -> str:
    return f"[{day(record):%a %b %e %H:%M:%S %Y}] {record.text}"


def decoded(record: LogRecord) -> str:
    facility = "kern" if record.is_kernel else "user"
    return f"{facility:<6}:{_NAMES[record.level]:<6}: {dmesg(record)}"


def raw(record: LogRecord) -> str:
    return f"<{record.facility << 3 | record.level}>{dmesg(record)}"


def iso(record: LogRecord) -> str:
    return f"{day(record):%Y-%m-%dT%H:%M:%S,%f}+00:00 {record.text}"


def callers(record: LogRecord) -> str:
    return f"[{seconds(record)}]{caller(record)} {record.text}"


def short(record: LogRecord) -> str:
    """As journalctl -k: a program's lines have its name in place of the kernel's."""
    name = "kernel" if record.is_kernel else "systemd[1]"
    return f"{day(record):%b %d %H:%M:%S} {HOST} {name}: {record.text}"


def short_iso(record: LogRecord) -> str:
    name = "kernel" if record.is_kernel else "systemd[1]"
    return f"{day(record):%Y-%m-%dT%H:%M:%S%z} {HOST} {name}: {record.text}"


def short_monotonic(record: LogRecord) -> str:
    name = "kernel" if record.is_kernel else "systemd[1]"
    return f"{stamp(record)}{HOST} {name}: {record.text}"


def journal_json(record: LogRecord) -> str:
    return json.dumps(
        {
            "__REALTIME_TIMESTAMP": f"{int(day(record).timestamp() * 10**6)}",
            "_SOURCE_MONOTONIC_TIMESTAMP": f"{record.time_ns // 1000}",
            "_TRANSPORT": "kernel",
            "_HOSTNAME": HOST,
            "PRIORITY": f"{record.level}",
            "SYSLOG_FACILITY": f"{record.facility}",
            "MESSAGE": record.text,
        }
    )


def messages(record: LogRecord) -> str:
    """As rsyslog writes it, which keeps the kernel's stamp."""
    return f"{day(record):%b %e %H:%M:%S} {HOST} kernel: {dmesg(record)}"


def of_ci(record: LogRecord) -> str:
    """As a CI keeps a console: a time of its own, colours, and CRLF."""
    time = f"{day(record):%Y-%m-%dT%H:%M:%S.%f}7Z"
    return f"{time} \x1b[32m{stamp(record)}\x1b[0m\x1b[33m{record.text}\x1b[0m\r"


def container(record: LogRecord) -> str:
    return f"guest-1  | {dmesg(record)}"


def bare(record: LogRecord) -> str:
    """As a console without printk.time, or journalctl -o cat."""
    return record.text


LINES: dict[str, Callable[[LogRecord], str]] = {
    "dmesg": dmesg,
    "dmesg -T": with_dates,
    "dmesg -x": decoded,
    "dmesg -r": raw,
    "dmesg --time-format iso": iso,
    "callers": callers,
    "journalctl -k": short,
    "journalctl -o short-iso": short_iso,
    "journalctl -o short-monotonic": short_monotonic,
    "journalctl -o json": journal_json,
    "/var/log/messages": messages,
    "CI": of_ci,
    "container": container,
    "bare": bare,
}


def dmesg_json(records: Iterable[LogRecord]) -> str:
    """As dmesg -J."""
    entries = ",".join(
        "{\n"
        f'         "pri": {each.facility << 3 | each.level},\n'
        f'         "time": {seconds(each)},\n'
        f'         "msg": {json.dumps(each.text)}\n'
        "      }"
        for each in records
    )
    return f'{{\n   "dmesg": [\n      {entries}\n   ]\n}}\n'


def pstore(records: Iterable[LogRecord], lines: int = 60) -> str:
    """As the files of pstore one after the other: the last part is the first."""
    raws = [raw(each) for each in records][-8 * lines :]
    parts = [raws[at : at + lines] for at in range(0, len(raws), lines)][::-1]
    return "".join(
        f"Panic#1 Part{number}\n" + "\n".join(part) + "\n"
        for number, part in enumerate(parts, 1)
    )


def texts(records: Iterable[LogRecord]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each format."""
    kept = [*records]
    for name, line in LINES.items():
        yield name, "".join(f"{line(each)}\n" for each in kept)
    yield "dmesg -J", dmesg_json(kept)
    yield "pstore", pstore(kept)
