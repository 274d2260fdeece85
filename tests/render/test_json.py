# SPDX-License-Identifier: LGPL-2.1-or-later

import io
import json
from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np
import pytest
from msgspec import Struct
from msgspec.structs import replace

from msatools.kernel.report import Note, Report
from msatools.model import Mark
from msatools.model import names as fields_of
from msatools.program import Crash
from msatools.program.model import Address
from msatools.reports.forms import dumps, show
from tests.locks.madelocks import TARGET

DUMP = replace(
    TARGET, path="/tmp/\udcff\x1b[31m.vmcore", crash=Crash("Oops", 1, None, None)
)


class Item(Struct, frozen=True):
    name: str
    where: Address
    pages: int


class SampleReport(Report, frozen=True, kw_only=True):
    schema: ClassVar[str] = "msatools.sample/1"

    items: tuple[Item, ...] = ()
    sums: Mapping[str, int] | None = None
    extra: object = None


def report(**payload: object) -> SampleReport:
    return SampleReport(
        target=DUMP,
        taken_at_ns=5,
        interval_ns=None,
        coverage={"reads": 3},
        notes=(Note("a-code", "A sentence."),),
        **payload,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Address(0xFFFF_8880_0000_0000), '"0xffff888000000000"'),
        (Address(0), '"0x0"'),
        ((1, (2, ())), "[1, [2, []]]"),
        (np.int64(-7), "-7"),
        (np.uint64(1 << 63), "9223372036854775808"),
        ({2: np.uint8(1), "a": None}, '{"2": 1, "a": null}'),
        (frozenset({3, 1}), "[1, 3]"),
        (True, "true"),
        (0.5, "0.5"),
        (
            Item("\x7f\n", Address(16), 2),
            r'{"name": "\u007f\n", "where": "0x10", "pages": 2}',
        ),
    ],
)
def test_values(value: object, expected: str) -> None:
    out = dumps(report(extra=value))
    assert out.endswith(f'"extra": {expected}}}')


class FormedReport(Report, frozen=True, kw_only=True):
    schema: ClassVar[str] = "msatools.formed/1"

    names: Annotated[tuple[str, ...] | None, Mark("form", len)] = None


@pytest.mark.parametrize(("names", "expected"), [(("a", "b"), 2), (None, None)])
def test_field_that_has_another_form_in_json(
    names: tuple[str, ...] | None, expected: int | None
) -> None:
    made = report()
    common = {name: getattr(made, name) for name in fields_of(Report)}
    formed = FormedReport(**common, names=names)
    assert json.loads(dumps(formed))["names"] == expected


def test_values_without_json_are_refused() -> None:
    for value in (object(), float("nan"), float("inf")):
        with pytest.raises((TypeError, ValueError)):
            dumps(report(extra=value))


def test_report_is_one_line_of_ascii() -> None:
    out = io.StringIO()
    show(report(), out)
    show(replace(report(), interval_ns=7), out)
    lines = out.getvalue().splitlines()
    assert [json.loads(line)["interval_ns"] for line in lines] == [None, 7]
    assert all(line.isascii() and line.isprintable() for line in lines)
