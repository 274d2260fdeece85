# SPDX-License-Identifier: LGPL-2.1-or-later

"""Mutations are found and chosen as intended; no mutant is tested here."""

from collections import Counter
from pathlib import Path

import pytest

from tests.support import mutants
from tests.support.mutations import (
    changes_code,
    find_mutations,
)

CONDITIONS = ("False", "True", "not a")
"""Replacements of the condition *a*."""


def changed(source: str, path: str = "x.py") -> set[str]:
    """Return the changed lines of a source in which only one line can change."""
    found = find_mutations(path, source)
    assert len({mutation.line for mutation in found}) <= 1
    return {mutation.changed_line(source).strip() for mutation in found}


@pytest.mark.parametrize(
    ("line", "others"),
    [
        ("a < b", {"a <= b", "a >= b"}),
        ("a is not b", {"a is b"}),
        ("a not in b", {"a in b"}),
        ("a == b != c", {"a != b != c", "a == b == c"}),
        ("a and b and c", {"a or b and c", "a and b or c"}),
        ("(a) - (b)", {"(a) + (b)"}),
        ("a << b", {"a >> b"}),
        ("a += b", {"a -= b"}),
        ("not a", {"a"}),
        ("f(0x1f)", {"f(0x1e)", "f(0x20)"}),
        ("'µ' < a", {"'µ' <= a", "'µ' >= a"}),
        ("True", set()),
        ("def f(a: 2 = b) -> 3: pass", set()),
        ("a = 'of' + b", set()),
        ("raise E(1 + a)", set()),
        ("f'{1 + a}'", set()),
        ("if TYPE_CHECKING: a = 1", set()),
        ('"""What is 1 + 1."""', set()),
    ],
)
def test_line(line: str, others: set[str]) -> None:
    assert changed(line) == others


@pytest.mark.parametrize(
    ("source", "others"),
    [
        ("if a:\n x", {"if False:", "if True:", "if not a:"}),
        ("while a():\n x", {"while False:", "while not a():"}),
        ("[x for x in y if a]", {f"[x for x in y if {it}]" for it in CONDITIONS}),
        ("def f():\n return a", {"return None"}),
        ("def f():\n return", set()),
        ("for x in y:\n break", {"continue"}),
    ],
)
def test_statement(source: str, others: set[str]) -> None:
    assert changed(source) == others


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ("a = 1 + 1", "a = 1 * 2", False),
        ("def f():\n if a: pass", "def f():\n if b: pass", True),
        ("def f(): return 1", "def f(): return 1.0", True),
        ("a = 1", "a = ", False),
        ("for x in y:\n break", "break", False),
    ],
)
def test_what_changes_code(before: str, after: str, changes: bool) -> None:
    assert changes_code(before, after) is changes


def test_same_seed_same_mutants(tmp_path: Path) -> None:
    for name in ("msatools/a/x.py", "msatools/b/y.py", "commands/z.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"x = a < b + {line}\n" for line in range(100)))
    chosen, again, others = (
        mutants.choose_mutants(tmp_path, 6, seed) for seed in (1, 1, 2)
    )
    assert chosen == again != others
    assert Counter(mutant.package for mutant in chosen) == {
        "msatools/a": 2,
        "msatools/b": 2,
        "commands": 2,
    }
