# SPDX-License-Identifier: LGPL-2.1-or-later

"""Mutations are found and chosen as intended; no mutant is tested here."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.support import mutants
from tests.support.mutations import (
    Mutation,
    changes_code,
    choose,
    code_lines,
    find_mutations,
    share,
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


def test_operator_on_a_line_of_its_own() -> None:
    source = "x = (\n    a  # -\n    - b\n)\n"
    (mutation,) = find_mutations("x.py", source)
    assert mutation.apply(source) == "x = (\n    a  # -\n    + b\n)\n"


def test_attributes_of_the_same_object() -> None:
    source = "def f(a, b):\n    a.x, a.y, b.z, a.run()\ndef g(a):\n    a.w\n"
    assert changed(source) == {"a.y, a.y, b.z, a.run()", "a.x, a.x, b.z, a.run()"}


def test_names_of_members() -> None:
    source = "f('list', g('pid'))\nf('next.x', h('pid'))\nf('a message')\n"
    lines = {mutation.changed_line(source) for mutation in find_mutations("x", source)}
    assert lines == {"f(\"next.x\", g('pid'))", "f(\"list\", h('pid'))"}


def test_members_in_tables() -> None:
    source = "T = {'a': ('u8', ('p', 'q')), 'b': ('u4', ('r',))}\n"
    assert changed(source) == {
        source.strip().replace(f"'{old}'", f'"{new}"')
        for old, new in [("u8", "u4"), ("u4", "u8"), ("p", "r"), ("r", "p")]
    }


C = """\
int f(int a) /* a < b */
{
\tif (a < 2 && !b) // 3
\t\tbreak;
\treturn 0;
}
"""


def test_c() -> None:
    lines = [one.changed_line(C).strip() for one in find_mutations("x.c", C)]
    assert Counter(lines) == {
        "if (a <= 2 && !b) // 3": 1,
        "if (a >= 2 && !b) // 3": 1,
        "if (a < (2 + 1) && !b) // 3": 1,
        "if (a < 2 || !b) // 3": 1,
        "if (a < 2 && b) // 3": 1,
        "continue;": 1,
        "return (0 + 1);": 1,
    }


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


def test_lines_of_code() -> None:
    assert code_lines("x.py", '"""A\ndocstring."""\n\n# Why.\nx = (\n  1\n)\n') == 3
    assert code_lines("x.c", C) == 6


def test_share() -> None:
    assert share({"a": 10, "b": 1000, "c": 500}, 10) == {"a": 1, "b": 6, "c": 3}
    assert share({"a": 10, "b": 1000, "c": 500}, 2) == {"a": 0, "b": 1, "c": 1}


def test_choice() -> None:
    found = [
        Mutation("p", line, 0, 1, str(new), "k") for line in (1, 2) for new in "ab"
    ]
    chosen = choose(found, 9, Random(1), lambda mutation: mutation.new == "b")
    assert sorted(mutation.line for mutation in chosen) == [1, 2]
    assert {mutation.new for mutation in chosen} == {"b"}


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


@pytest.mark.parametrize(
    ("path", "first"),
    [
        (
            "msatools/locks/graph.py",
            [
                "tests/locks/test_graph.py",
                "tests/locks/test_a.py",
                "tests/locks/test_b.py",
                "tests/render/test_locks.py",
                "tests/truth/test_facts.py",
            ],
        ),
        ("msatools/render/locks/tree.py", ["tests/render/test_locks.py"]),
        (
            "commands/memstat.py",
            ["tests/memory/test_command.py", "tests/truth/test_facts.py"],
        ),
        (
            "msatools/cli/main.py",
            ["tests/cli/test_main.py", "tests/truth/test_facts.py"],
        ),
    ],
)
def test_tests_of_a_module(path: str, first: list[str]) -> None:
    tests = [
        "tests/locks/test_b.py",
        "tests/locks/test_a.py",
        "tests/locks/test_graph.py",
        "tests/memory/test_command.py",
        "tests/render/test_locks.py",
        "tests/cli/test_main.py",
        "tests/truth/test_facts.py",
    ]
    texts = dict.fromkeys(tests, "") | {
        "tests/locks/test_a.py": "from msatools.locks.graph import x"
    }
    found = mutants.tests_of(path, tests, texts)
    assert found[: len(first)] == first


def outcome(path: str, noticed_by: str | None) -> mutants.Outcome:
    mutation = Mutation(path, 1, 4, 5, "2", "off by one")
    return mutants.Outcome(mutants.Mutant(7, mutation, "x = 1"), noticed_by, 12.3)


def test_outcomes_are_described() -> None:
    assert outcome("msatools/a/b.py", "tests/a::b").describe().splitlines() == [
        "  7  msatools/a/b.py:1  off by one",
        "     - x = 1",
        "     + x = 2",
        "     killed by tests/a::b  (12 s)",
    ]
    assert "MISSED" in outcome("msatools/a/b.py", None).describe()


def test_table() -> None:
    outcomes = [
        outcome("msatools/b/x.py", None),
        outcome("msatools/a/x.py", "t"),
        outcome("msatools/a/y.py", "t"),
    ]
    assert mutants.table(outcomes) == [
        "package     tried  noticed     %",
        "msatools/a      2        2   100",
        "msatools/b      1        0     0",
        "all             3        2    67",
    ]


def test_every_product_file_is_a_candidate() -> None:
    """Every module and the C source can be mutated."""
    files = {path for pattern in mutants.PRODUCT for path in mutants.ROOT.glob(pattern)}
    assert {path.suffix for path in files} == {".py", ".c"}
    assert len({mutants.package_of(str(path)) for path in files}) > 20
