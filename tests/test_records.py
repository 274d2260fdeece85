# SPDX-License-Identifier: LGPL-2.1-or-later

"""Classes of ``msatools.records`` do what those of ``dataclasses`` do."""

import ast
import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from msatools.records import MANY, dataclass

ROOT = Path(__file__).parents[1]
KINDS = (
    {},
    {"frozen": True},
    {"frozen": True, "slots": True},
    {"frozen": True, "kw_only": True},
    {"frozen": True, "kw_only": True, "slots": True},
    {"frozen": True, "eq": False},
)


def classes(decorator: Callable[..., Any], kind: dict[str, bool]) -> tuple[Any, Any]:
    """Return a class with fields of each kind, and one that inherits from it."""

    @decorator(**kind)
    class Made:
        pid: int
        name: str = field(metadata={"key": "comm"})
        children: list[int] = field(default_factory=list)
        secret: str = field(default="", repr=False)
        seen_ns: int = field(default=0, compare=False)
        late: int = field(default=7, kw_only=True)

        @property
        def double(self) -> int:
            return 2 * self.pid

    @decorator(**kind)
    class Heir(Made):
        seen_ns: int = 5
        more: tuple[int, ...] = ()

    return Made, Heir


@pytest.fixture(params=KINDS, ids=lambda kind: "+".join(kind) or "plain")
def kind(request: pytest.FixtureRequest) -> dict[str, bool]:
    return request.param


@pytest.fixture(params=(0, 2 * MANY), ids=("few", "many"))
def pairs(request: pytest.FixtureRequest, kind: dict[str, bool]) -> list[Any]:
    """Classes of ours and the standard's, with few and with many objects."""
    ours, standard = classes(dataclass, kind), classes(dataclasses.dataclass, kind)
    for cls in ours:
        for number in range(request.param):
            cls(pid=number, name="x")
    return list(zip(ours, standard, strict=True))


def outcome(work: Callable[[], object]) -> object:
    """Return what comes of it, or what kind of error."""
    try:
        return work()
    except Exception as error:
        return type(error)


def test_what_may_be_given(kind: dict[str, bool], pairs: list[Any]) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}),
        ((1, "a"), {}),
        ((1,), {"name": "a"}),
        ((1,), {"pid": 1, "name": "a"}),
        ((), {"pid": 1, "name": "a", "children": [3], "secret": "s", "late": 9}),
        ((), {"pid": 1, "name": "a", "unknown": 3}),
        ((1, "a", [3], "s", 8), {}),
        ((1, "a", [3], "s", 8, (4,)), {}),
        ((1, "a", [3], "s", 8, (4,), 9), {}),
        ((), {"pid": 1, "name": "a", "seen_ns": 8, "more": (4,)}),
    ]
    good = 0
    for ours, standard in pairs:
        for args, values in calls:
            made = outcome(lambda: astuple(ours(*args, **values)))  # noqa: B023
            expected = outcome(lambda: astuple(standard(*args, **values)))  # noqa: B023
            assert made == expected, (args, values)
            good += isinstance(made, tuple)
    assert good >= 3


def test_the_same_to_see_and_to_compare(
    kind: dict[str, bool], pairs: list[Any]
) -> None:
    for pair in pairs:
        seen = []
        for cls in pair:
            one, same, other = (cls(pid=pid, name="a") for pid in (1, 1, 2))
            late = replace(one, seen_ns=99)
            seen.append(
                (
                    repr(one).rpartition(".")[2],
                    one == same,
                    one == late,
                    one == other,
                    one != same,
                    one == 1,
                    one == astuple(one),
                    outcome(lambda: hash(one) == hash(same)),  # noqa: B023
                    asdict(late),
                    [(each.name, each.metadata) for each in fields(cls)],
                    is_dataclass(cls),
                    cls.__match_args__,
                    one.double,
                    one.children is same.children,
                    hasattr(one, "__dict__"),
                )
            )
        assert seen[0] == seen[1]


def test_what_is_hashed_can_be_found(kind: dict[str, bool], pairs: list[Any]) -> None:
    for ours, _ in pairs:
        one, same, other = (ours(pid=pid, name="a", children=()) for pid in (1, 1, 2))
        if kind.get("frozen"):
            assert hash(one) != hash(other)
            assert (same in {one: 1}) is kind.get("eq", True)
            assert other not in {one: 1}
        else:
            assert outcome(lambda: hash(one)) is TypeError  # noqa: B023


def test_what_is_frozen_cannot_change(kind: dict[str, bool], pairs: list[Any]) -> None:
    for pair in pairs:
        changed = []
        for cls in pair:
            one = cls(pid=1, name="a")
            changed.append(
                [
                    outcome(lambda: setattr(one, "pid", 2)),  # noqa: B023
                    outcome(lambda: delattr(one, "name")),  # noqa: B023
                    one.pid,
                    outcome(lambda: one.name),  # noqa: B023
                ]
            )
        assert changed[0] == changed[1]
        assert (changed[0][0] is dataclasses.FrozenInstanceError) == bool(
            kind.get("frozen")
        )


def test_own_methods_stay() -> None:
    for decorator in (dataclass, dataclasses.dataclass):

        @decorator(frozen=True)
        class Own:
            name: str

            def __eq__(self, other: object) -> bool:
                return isinstance(other, Own) and self.name[0] == other.name[0]

            def __repr__(self) -> str:
                return self.name

        made = [Own(f"a{number}") for number in range(2 * MANY)]
        assert made[0] == made[-1]
        assert repr(made[-1]) == f"a{2 * MANY - 1}"


@dataclass(frozen=True, slots=True)
class Slotted:
    """A class that pickle can find."""

    name: str
    number: int = 3


@dataclass(frozen=True)
class Unslotted:
    """The same without slots."""

    name: str
    number: int = 3


@pytest.mark.parametrize("cls", [Slotted, Unslotted])
def test_copies_are_equal(cls: type) -> None:
    one = cls("a", 5)
    assert copy.deepcopy(one) == one
    assert pickle.loads(pickle.dumps(one)) == one


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for folder in ("msatools", "commands"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def test_all_classes_are_made_so() -> None:
    found, other = 0, []
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names = {alias.name for alias in node.names}
                found += node.module == "msatools.records"
                if node.module == "dataclasses" and "dataclass" in names:
                    other.append(str(path))
    assert found > 200
    assert other == ["msatools/records.py"]


def test_no_class_needs_more() -> None:
    """What is not there would be left out without a word."""
    text = {path: ast.dump(tree) for path, tree in trees()}
    assert not [
        path
        for path, dump in text.items()
        if "'__post_init__'" in dump or "'InitVar'" in dump
    ]
