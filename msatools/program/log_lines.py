# SPDX-License-Identifier: LGPL-2.1-or-later

"""Parser of the lines of kernel logs that are texts: time, writer, level, message.

:mod:`msatools.program.log_text` calls it for the texts of msa-report.
"""

import re
from calendar import timegm
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from msgspec import DecodeError
from msgspec.json import decode as decode_json

# --- Patterns for the start of a line: time, host and program.


Clock = Literal["boot", "day"]
"""Clock of a log's times. ``boot``: seconds since the kernel started; ``day``: the time
of day."""

_MONTHS = [
    *("Jan", "Feb", "Mar", "Apr", "May", "Jun"),
    *("Jul", "Aug", "Sep", "Oct", "Nov", "Dec"),
]
_MONTH = rf"(?P<month>{'|'.join(_MONTHS)})"
_HOUR = r"(?P<hour>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?"
_DATE = r"(?P<date>\d{4}-\d\d-\d\d)"
_ZONE = r"(?P<zone> ?(?:Z|UTC|GMT|[+-]\d\d:?\d\d(?: UTC)?))?"

_STAMPED = re.compile(
    # The level (dmesg -r), the stamp with the difference to the last one (dmesg -d),
    # the thread or CPU (CONFIG_PRINTK_CALLER), and the level of crash's `log -m`.
    r"(?:<(?P<priority>\d{1,3})>)?"
    r"\[ *(?P<seconds>\d{1,9})\.(?P<micros>\d{6})(?: <[ \d.]{1,20}>)?\]"
    r"(?:\[ *(?P<caller>[TC])(?P<number>\d{1,10})[^\]]{0,40}\])?"
    r"(?: ?<(?P<level>[0-7])>)? ?"
)
"""The stamp of printk (kernel/printk/printk.c, info_print_prefix())."""

_BEFORE, _STAMP = 160, 100
"""Maximum characters before printk's stamp, which other programs add, and of the stamp
itself."""

_MAY_BE_JSON = ' {"'

_DATED = tuple(
    re.compile(pattern)
    for pattern in (
        # dmesg -T; crash's `log -T` has a zone before the year.
        rf"\[\w{{3}} {_MONTH} +(?P<day>\d{{1,2}}) {_HOUR}(?: [A-Z]{{2,5}})? "
        r"(?P<year>\d{4})\] ?",
        # syslog(3), and journalctl -o short
        rf"(?:<\d{{1,3}}>)?{_MONTH} +(?P<day>\d{{1,2}}) {_HOUR} ",
        # journalctl -o short-full, in whatever zone
        rf"\w{{3}} {_DATE} {_HOUR}"
        r"(?P<zone> (?:[A-Z][A-Za-z]{1,5}|[+-]\d\d(?:\d\d)?))? ",
        # dmesg --time-format iso, journalctl -o short-iso, rsyslog, CI
        rf"\[?{_DATE}[T ]{_HOUR}{_ZONE}\]?[ \t|:]+",
        # journalctl -o short-unix
        r"(?P<epoch>\d{9,11})\.(?P<part>\d{6}) ",
    )
)
_PLAIN_DAY = re.compile(rf"\[{_MONTH}(?P<day>[ \d]\d) (?P<hour>\d\d:\d\d)\] ?")
_PLAIN_STEP = re.compile(r"\[ *\+(?P<seconds>\d{1,9})\.(?P<micros>\d{6})\] ?")
"""dmesg -H: the minute, then seconds since the line before."""

_WRITER = re.compile(
    # Some programs write facility and level in place of the host.
    r"(?:(?:[a-z]+\d?\.[a-z]+|(?P<host>[\w.:-]{1,255})) )?"
    r"(?P<name>kernel|[^\s:\[]{1,64}(?:\[\d{1,10}\])?): ?"
)
"""Host and program, as syslog writes them."""

_DECODED = re.compile(r"(?P<facility>[a-z]+\d?) *[.:](?P<level>[a-z]+) *:?$")
"""dmesg -x: facility and level by name."""

_LEVELS = {"emerg": 0, "panic": 0, "alert": 1, "crit": 2, "err": 3, "error": 3}
_LEVELS |= {"warn": 4, "warning": 4, "notice": 5, "info": 6, "debug": 7}
_KERNEL = "kernel"
_USER = 1
"""Facility of messages that programs write."""


_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_()].?)"
)
"""ANSI escape sequences: colours, cursors and titles of terminals."""

_YEAR = 1972
"""Year assumed for dates without one: a leap year, so that February 29 exists."""

NS = 10**9

_MOST_HOSTS = 50
"""Maximum number of hosts in one text."""

FEW, SHARE = 50, 0.05
"""Minimum number of a kernel's lines in a log, or else their minimum share of all."""


Form = Literal["stamp", "kernel", "dated", "bare"]


class LogLine(NamedTuple):
    """The parts of a line of a text."""

    number: int
    form: Form
    """How the line begins. ``stamp``: with printk's stamp; ``kernel``: with the
    kernel's name; ``dated``: with a time only; ``bare``: with neither."""

    when: str
    """Time as the line writes it; empty if there is none."""

    boot_ns: int | None
    day_ns: int | None
    is_zoned: bool
    """Whether the time of day has a zone."""

    host: str | None
    text: str
    level: int | None = None
    facility: int = 0
    tid: int | None = None
    cpu: int | None = None


class _Dated(NamedTuple):
    """The time of day at the start of a line."""

    when: str
    ns: int
    is_zoned: bool
    end: int


class LineParser:
    """Parses the lines of a text in their order."""

    def __init__(self, hosts: frozenset[str]) -> None:
        """
        :param hosts: The hosts whose kernels wrote lines of the text.
        """
        self._hosts = hosts
        self._last = _DATED[0]
        self._days: dict[str, int] = {}
        self._plain_ns = 0
        self._month, self._years = 0, 0
        self._json: dict[str, str] = {}

    def parse(self, number: int, line: str) -> LogLine | None:
        """Return the parts of a line; ``None`` if a program wrote it."""
        # The stamp first, as most lines begin with it.
        stamp, dated, writer, rest = _STAMPED.match(line), None, None, line
        if stamp is None:
            if line[:1] in _MAY_BE_JSON and (
                found := self._of_json(number, line.strip())
            ):
                return found
            dated = self._dated(line)
            if dated is not None:
                rest = line[dated.end :]
                writer = self._writer(rest)
            if writer is not None:
                rest = rest[writer.end() :]
            stamp = _STAMPED.search(rest, 0, _BEFORE + _STAMP) if "[" in rest else None
        if stamp is None or stamp.start() > _BEFORE:
            return _unstamped(number, dated, writer, rest)
        before, rest = rest[: stamp.start()], rest[stamp.end() :]
        if dated is None and (before or self._hosts):
            writer = _named(before) if before else self._writer(rest)
            if writer is not None and not before:
                # journalctl -o short-monotonic
                rest = rest[writer.end() :]
        if writer is not None and writer["name"] != _KERNEL:
            return None
        level, facility = _importance(stamp, before)
        caller = None if stamp["number"] is None else int(stamp["number"])
        return LogLine(
            number=number,
            form="stamp",
            when=f"{int(stamp['seconds'])}.{stamp['micros']} s",
            boot_ns=_ns(stamp["seconds"], stamp["micros"]),
            day_ns=dated.ns if dated else None,
            is_zoned=dated is not None and dated.is_zoned,
            level=level,
            facility=facility,
            tid=caller if stamp["caller"] == "T" else None,
            cpu=caller if stamp["caller"] == "C" else None,
            host=writer["host"] if writer is not None else None,
            text=rest,
        )

    def _writer(self, rest: str) -> re.Match[str] | None:
        """Match host and program; ``None`` if absent, or if the host is unknown."""
        found = _WRITER.match(rest)
        if found is None or (found["host"] or "") not in self._hosts:
            return None
        return found

    def _dated(self, line: str) -> _Dated | None:
        if not (line[:1].isdigit() or line[:1] in "[<" or line[:1].isupper()):
            return None
        for pattern in (self._last, *_DATED):
            if found := pattern.match(line):
                self._last = pattern
                return self._of_date(found)
        if found := _PLAIN_DAY.match(line):
            try:
                day_ns = self._day_ns(found)
            except ValueError:
                return None  # no such day
            self._plain_ns = day_ns + _seconds(f"{found['hour']}:00") * NS
        elif found := _PLAIN_STEP.match(line):
            self._plain_ns += _ns(found["seconds"], found["micros"])
        else:
            return None
        return _Dated(found[0].strip(" []"), self._plain_ns, False, found.end())

    def _of_date(self, found: re.Match[str]) -> _Dated | None:
        parts = found.groupdict()
        part_ns = int((parts["part"] or "0").ljust(9, "0"))
        when = found[0].strip(" \t|:[]")
        if "epoch" in parts:
            return _Dated(when, int(parts["epoch"]) * NS + part_ns, True, found.end())
        try:
            day_ns = self._day_ns(found)
        except ValueError:
            return None  # no such day
        ns = day_ns + _seconds(parts["hour"]) * NS + part_ns
        zone = (parts.get("zone") or "").strip().removesuffix(" UTC")
        offset = _offset(zone)
        return _Dated(when, ns - (offset or 0) * NS, offset is not None, found.end())

    def _day_ns(self, found: re.Match[str]) -> int:
        """Return the start of a day in ns since 1970, as if it were in UTC.

        :raises ValueError: if there is no such day
        """
        parts = found.groupdict()
        if date := parts.get("date"):
            year, month, day = map(int, date.split("-"))
        else:
            month, day = _MONTHS.index(parts["month"]) + 1, int(parts["day"])
            year = int(parts.get("year") or 0)
            if not year:
                # A new year begins only from December to January: a zone or a clock
                # that is set may lead back over the end of another month.
                self._years += (self._month, month) == (12, 1)
                self._month, year = month, _YEAR + 4 * self._years
        key = f"{year}-{month}-{day}"
        if key not in self._days:
            if not (1 <= month <= 12 and 1 <= day <= 31 and 1970 <= year <= 2200):
                raise ValueError(key)
            self._days[key] = timegm((year, month, day, 0, 0, 0)) * NS
        return self._days[key]

    def _of_json(self, number: int, line: str) -> LogLine | None:
        """Parse a line of ``journalctl -o json``, or of a message of dmesg -J.

        :return: ``None`` before the last line of a message of dmesg -J, and for others.
        """
        if found := re.match(r'"(pri|time|msg)": *(.*?),?$', line):
            self._json[found[1]] = found[2]
            if found[1] != "msg":
                return None
            entry, self._json = self._json, {}
            return _of_dmesg(number, entry)
        if not line.startswith("{"):
            return None
        try:
            fields = decode_json(line, type=dict[str, Any])
        except (DecodeError, RecursionError):
            return None
        return _of_journal(number, fields)


def _unstamped(
    number: int, dated: _Dated | None, writer: re.Match[str] | None, text: str
) -> LogLine | None:
    """Return a line without the kernel's stamp; ``None`` if a program wrote it."""
    form: Form = "bare" if dated is None else "dated"
    host = None
    if writer is not None:
        if writer["name"] != _KERNEL:
            return None
        form, host = "kernel", writer["host"]
    return LogLine(
        number=number,
        form=form,
        when=dated.when if dated else "",
        boot_ns=None,
        day_ns=dated.ns if dated else None,
        is_zoned=dated is not None and dated.is_zoned,
        host=host,
        text=text,
    )


def _importance(stamp: re.Match[str], before: str) -> tuple[int | None, int]:
    """Return the level, ``None`` if it is unknown, and the facility of a line."""
    if stamp["priority"] is not None:
        return int(stamp["priority"]) & 7, int(stamp["priority"]) >> 3
    if stamp["level"] is not None:
        return int(stamp["level"]), 0
    if decoded := _DECODED.match(before.strip()):
        facility = 0 if decoded["facility"] == "kern" else _USER
        return _LEVELS.get(decoded["level"]), facility
    return None, 0


def _of_dmesg(number: int, entry: dict[str, str]) -> LogLine | None:
    try:
        text = decode_json(entry["msg"], type=str)
        seconds, _, micros = entry["time"].strip(' "').partition(".")
        priority = int(entry["pri"])
        ns = _ns(seconds, micros)
    except (KeyError, ValueError, DecodeError):
        return None
    return LogLine(
        number=number,
        form="stamp",
        when=f"{seconds}.{micros} s",
        boot_ns=ns,
        day_ns=None,
        is_zoned=False,
        host=None,
        text=text,
        level=priority & 7,
        facility=priority >> 3,
    )


def _of_journal(number: int, fields: dict[str, Any]) -> LogLine | None:
    """Return the line of a message in the journal; ``None`` if not a kernel's."""
    text = fields.get("MESSAGE")
    if isinstance(text, list):
        # A list of bytes: the text is not UTF-8, or has control characters.
        whole = bytes(
            each for each in text if isinstance(each, int) and 0 <= each < 256
        )
        text = whole.decode("utf-8", "backslashreplace")
    if not isinstance(text, str) or fields.get("_TRANSPORT") != _KERNEL:
        return None
    day_us = _integer(fields.get("__REALTIME_TIMESTAMP"))
    boot_us = _integer(fields.get("_SOURCE_MONOTONIC_TIMESTAMP"))
    host = fields.get("_HOSTNAME")
    return LogLine(
        number=number,
        form="kernel" if boot_us is None else "stamp",
        when="" if boot_us is None else f"{boot_us / 1e6:.6f} s",
        boot_ns=None if boot_us is None else boot_us * 1000,
        day_ns=None if day_us is None else day_us * 1000,
        is_zoned=True,
        level=_integer(fields.get("PRIORITY")),
        facility=_integer(fields.get("SYSLOG_FACILITY")) or 0,
        host=host if isinstance(host, str) else None,
        text=text,
    )


def _integer(value: object) -> int | None:
    """Return a number that the journal writes as a text in JSON; ``None`` if none."""
    found = re.fullmatch(r"\d{1,18}", str(value), re.ASCII)
    return int(found[0]) if found else None


def _named(before: str) -> re.Match[str] | None:
    """Match host and program in the part before the kernel's stamp."""
    return re.search(
        r"(?:(?P<host>[\w.-]{1,255}) )?(?P<name>[^\s:\[]{1,64})(?:\[\d{1,10}\])?: $",
        before,
    )


def _ns(seconds: str, micros: str) -> int:
    return int(seconds) * NS + int(micros.ljust(6, "0")[:6]) * 1000


def _seconds(hour: str) -> int:
    hours, minutes, seconds = map(int, hour.split(":"))
    return hours * 3600 + minutes * 60 + seconds


def _offset(zone: str) -> int | None:
    """Return the seconds that a zone such as ``+01:00`` is ahead of UTC.

    :return: ``None`` for other names of zones, which are ambiguous.
    """
    if zone[:1] not in ("+", "-"):
        return 0 if zone in ("Z", "UTC", "GMT") else None
    digits = zone[1:].replace(":", "")
    seconds = int(digits[:2]) * 3600 + int(digits[2:4] or 0) * 60
    return -seconds if zone[0] == "-" else seconds


def clean_line(line: str) -> str:
    """Return a line without escape sequences and text that a console overwrote."""
    if "\x1b" in line:
        line = _ESCAPES.sub("", line)
    line = line.strip("\r\0")
    # A carriage return follows text that the console overwrites.
    return line.rpartition("\r")[2] if "\r" in line else line


def hosts_of(lines: Sequence[str]) -> frozenset[str]:
    """Return the hosts whose kernels wrote lines of a text, by syslog's names.

    An empty name stands for lines without a host.
    """
    hosts: Counter[str] = Counter()
    nameless = 0
    for line in lines:
        start = line[:_BEFORE]
        if "kernel: " not in start:
            continue
        dates = (found.end() for each in _DATED if (found := each.match(start)))
        rest = start[next(dates, 0) :]
        if rest.startswith("kernel: "):
            # After a date in brackets, by dmesg, "kernel: " is a part of the message.
            nameless += len(rest) < len(start) and not start.startswith("[")
        elif found := re.search(r"(?:^|[\] ])([\w.:-]{1,255}) kernel: ", rest):
            is_facility = re.fullmatch(r"[a-z]+\d?\.[a-z]+", found[1])
            hosts["" if is_facility else found[1]] += 1
    if nameless >= min(FEW, SHARE * len(lines)):
        # journalctl --no-hostname; fewer may be parts of messages.
        hosts[""] += nameless
    return frozenset(name for name, _ in hosts.most_common(_MOST_HOSTS))
