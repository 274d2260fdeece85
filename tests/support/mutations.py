# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Find small changes of source lines that change what the code does.

Changes are found in Python's syntax tree and applied to the text, so that the rest of
the file is unchanged. mutants.py runs the tests on them.
"""

import ast
import io
import itertools
import re
import tokenize
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import CodeType

COMPARED: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<", "<=", ">="),
    ast.LtE: ("<=", "<", ">"),
    ast.Gt: (">", ">=", "<="),
    ast.GtE: (">=", ">", "<"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
"""The operator's text, then its replacements."""

COMPUTED: dict[type[ast.operator], tuple[str, ...]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
}

C_OPERATORS = {
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
    "&&": ("||",),
    "||": ("&&",),
    "+": ("-",),
    "-": ("+",),
    "/": ("*",),
    "%": ("/",),
    "&": ("|",),
    "+=": ("-=",),
    "|=": ("&=",),
    "&=": ("|=",),
}

_MEMBER = re.compile(r"[A-Za-z_][\w.]*")
"""A string that can be the name of a member, field or type; messages have blanks."""

_C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_C_OPERATOR = re.compile(
    r"(?<= )(?:" + "|".join(map(re.escape, C_OPERATORS)) + r")(?= )"
)
_C_NUMBER = re.compile(r"(?<![\w.])(?:0[xX][\da-fA-F]+|\d+)(?![\w.])")
_C_WORD = re.compile(r"\b(?:break|continue)\b(?=;)|!(?=[\w(*])")


@dataclass(frozen=True, order=True)
class Mutation:
    """A replacement of part of one line."""

    path: str
    line: int
    """From 1."""
    start: int
    """Column in characters, from 0."""
    end: int
    new: str
    kind: str

    def line_of(self, source: str) -> str:
        """Return the original line."""
        return source.splitlines()[self.line - 1]

    def changed_line(self, source: str) -> str:
        """Return the changed line."""
        line = self.line_of(source)
        return line[: self.start] + self.new + line[self.end :]

    def apply(self, source: str) -> str:
        """Return the file's text with the change made."""
        lines = source.splitlines(keepends=True)
        ending = lines[self.line - 1][len(self.line_of(source)) :]
        lines[self.line - 1] = self.changed_line(source) + ending
        return "".join(lines)


def find_mutations(path: str, source: str) -> list[Mutation]:
    """Return mutations of a Python or C file; some do not compile or change nothing."""
    finder = _c_mutations if path.endswith(".c") else _python_mutations
    return sorted(set(finder(path, source)))


def changes_code(before: str, after: str) -> bool:
    """Return whether *after* compiles to bytecode other than that of *before*."""
    try:
        return _shape(compile(after, "x", "exec")) != _shape(
            compile(before, "x", "exec")
        )
    except (SyntaxError, ValueError):
        return False


def _shape(code: CodeType) -> tuple[object, ...]:
    """Return the bytecode with its constants and names, without source positions."""
    constants = tuple(
        _shape(value) if isinstance(value, CodeType) else (type(value), repr(value))
        for value in code.co_consts
    )
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, constants, names


def code_lines(path: str, source: str) -> int:
    """Count the lines with code, not only a comment or docstring."""
    if path.endswith(".c"):
        return sum(map(bool, map(str.strip, _without_comments(source).splitlines())))
    kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER)
    return len({token.start[0] for token in _tokens(source) if token.type in kinds})


def share(lines: Mapping[str, int], count: int) -> dict[str, int]:
    """Share *count* mutants among packages by their lines of code.

    Each package gets at least one, if there are enough. The others are allocated by the
    Sainte-Laguë method.
    """
    shares = dict.fromkeys(lines, 1 if count >= len(lines) else 0)
    for _ in range(count - sum(shares.values())):
        shares[max(lines, key=lambda name: lines[name] / (2 * shares[name] + 1))] += 1
    return shares


def choose(
    found: Iterable[Mutation],
    count: int,
    random: Random,
    works: Callable[[Mutation], bool],
) -> list[Mutation]:
    """Choose mutations at random: first a line, then a kind of mutation on it.

    :param works: Returns whether a mutation changes the code; called only as needed.
    """
    lines: dict[tuple[str, int], list[Mutation]] = defaultdict(list)
    for mutation in sorted(found):
        lines[mutation.path, mutation.line].append(mutation)
    chosen: list[Mutation] = []
    for line in random.sample(sorted(lines), len(lines)):
        if len(chosen) == count:
            break
        options = filter(works, _kinds_in_turn(lines[line], random))
        chosen += itertools.islice(options, 1)
    return chosen


def _kinds_in_turn(found: Sequence[Mutation], random: Random) -> list[Mutation]:
    """Shuffle mutations so that one of each kind comes first."""
    shuffled = random.sample(found, len(found))
    seen: Counter[str] = Counter()
    turns = {}
    for mutation in shuffled:
        turns[mutation] = seen[mutation.kind]
        seen[mutation.kind] += 1
    return sorted(shuffled, key=turns.__getitem__)


def _tokens(source: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(source).readline))


def _python_mutations(path: str, source: str) -> Iterator[Mutation]:
    return _Finder(path, source).find()


class _Finder:
    """Finds the mutations of one Python file."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.lines = source.splitlines()
        self.tokens = _tokens(source)
        self.starts = [token.start for token in self.tokens]
        self.tree = ast.parse(source)
        self.imported = set(_imported_names(self.tree))
        self.siblings: dict[tuple[object, ...], set[str]] = defaultdict(set)

    def find(self) -> Iterator[Mutation]:
        nodes = list(self._walk(self.tree, ()))
        for node, parents in nodes:
            for key, name, *_ in self._names(node, parents):
                self.siblings[key].add(name)
        for node, parents in nodes:
            yield from self._of(node, parents)

    def _walk(
        self, node: ast.AST, parents: tuple[ast.AST, ...]
    ) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
        """Yield the nodes that are executed, except messages, with their parents."""
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)):
            return
        if isinstance(node, ast.If) and _is_aside(node.test):
            return
        yield node, parents
        skipped = {"annotation", "returns", "decorator_list", "type_comment"}
        for name, value in ast.iter_fields(node):
            if name in skipped:
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._walk(child, (*parents, node))

    def _of(self, node: ast.AST, parents: Sequence[ast.AST]) -> Iterator[Mutation]:
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
                for number, operator in enumerate(node.ops):
                    ends = operands[number], operands[number + 1]
                    yield from self._operator(*ends, COMPARED[type(operator)])
            case ast.BoolOp():
                old = "and" if isinstance(node.op, ast.And) else "or"
                words = old, "or" if old == "and" else "and"
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield from self._operator(left, right, words)
            case ast.BinOp() if not _joins(node):
                words = COMPUTED.get(type(node.op), ("",))
                yield from self._operator(node.left, node.right, words)
            case ast.AugAssign() if type(node.op) in COMPUTED:
                old, *others = (f"{word}=" for word in COMPUTED[type(node.op)])
                yield from self._operator(node.target, node.value, (old, *others))
            case ast.UnaryOp(op=ast.Not()):
                yield from self._replace(node, self._text(node.operand), "not dropped")
            case ast.UnaryOp(op=ast.USub()):
                yield from self._replace(node, self._text(node.operand), "sign dropped")
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                for other in (value - 1, value + 1):
                    text = self._text(node) or ""
                    new = hex(other) if text.startswith("0x") and other > 0 else other
                    yield from self._replace(node, str(new), "off by one")
            case ast.Return(value=ast.expr() as value):
                yield from self._replace(value, "None", "nothing returned")
            case ast.Continue() | ast.Break():
                new = "break" if isinstance(node, ast.Continue) else "continue"
                yield from self._replace(node, new, "continue or break")
            case ast.If() | ast.IfExp() | ast.While():
                yield from self._condition(node.test, isinstance(node, ast.While))
            case ast.comprehension():
                for test in node.ifs:
                    yield from self._condition(test, False)
        for key, name, old, start in self._names(node, parents):
            for other in sorted(self.siblings[key] - {name}):
                yield from self._replace(old, other, "another member", start)

    def _condition(self, test: ast.expr, loops: bool) -> Iterator[Mutation]:
        yield from self._replace(test, "False", "branch dropped")
        if not loops:
            yield from self._replace(test, "True", "branch always taken")
        if isinstance(test, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
            yield from self._replace(test, f"not {self._text(test)}", "not added")

    def _names(
        self, node: ast.AST, parents: Sequence[ast.AST]
    ) -> Iterator[tuple[tuple[object, ...], str, ast.expr, int]]:
        """Yield names of members: key of their siblings, name, node, and length or 0.

        Attributes are siblings if they are of the same object in the same function (of
        ``self``: in the same class). Strings are siblings if they are the same argument
        of the same function, or at the same index in tables within one statement.
        """
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = ast.unparse(node.value)
            called = isinstance(parents[-1], ast.Call) and parents[-1].func is node
            if owner in self.imported or node.lineno != node.end_lineno:
                return
            wanted = (ast.ClassDef,) if owner == "self" else (ast.FunctionDef,)
            scope = next(
                (at for at in reversed(parents) if isinstance(at, wanted)), None
            )
            key = ("attribute", id(scope), owner, called)
            yield key, node.attr, node, len(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if not _MEMBER.fullmatch(node.value):
                return
            parent = parents[-1]
            if isinstance(parent, ast.Call) and node in parent.args:
                where = ast.unparse(parent.func), parent.args.index(node)
                yield ("argument", *where), f'"{node.value}"', node, 0
            elif isinstance(parent, (ast.Tuple, ast.List)):
                where = _statement(parents), len(parents), parent.elts.index(node)
                yield ("table", *where), f'"{node.value}"', node, 0

    def _operator(
        self, left: ast.expr, right: ast.expr, words: Sequence[str]
    ) -> Iterator[Mutation]:
        """Yield the replacements of the operator between two operands."""
        first, last = self._end(left), self._start(right)
        old, *others = words
        span = slice(bisect_left(self.starts, first), bisect_left(self.starts, last))
        between = [token for token in self.tokens[span] if token.string in old.split()]
        if not between or between[0].start[0] != between[-1].end[0]:
            return
        line, start = between[0].start
        end = between[-1].end[1]
        for other in others:
            yield Mutation(self.path, line, start, end, other, f"{old} -> {other}")

    def _replace(
        self, node: ast.expr | ast.stmt, new: str | None, kind: str, tail: int = 0
    ) -> Iterator[Mutation]:
        """Replace a node, or its last *tail* characters, if it is on one line."""
        (line, start), (last, end) = self._start(node), self._end(node)
        if line == last and new is not None:
            start = end - tail if tail else start
            if self.lines[line - 1][start:end] != new:
                yield Mutation(self.path, line, start, end, new, kind)

    def _text(self, node: ast.expr) -> str | None:
        """Return a node's text, parenthesized if needed; ``None`` if multi-line."""
        (line, start), (last, end) = self._start(node), self._end(node)
        if line != last:
            return None
        text = self.lines[line - 1][start:end]
        simple = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
        return text if isinstance(node, simple) else f"({text})"

    def _start(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        return node.lineno, self._column(node.lineno, node.col_offset)

    def _end(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return node.end_lineno, self._column(node.end_lineno, node.end_col_offset)

    def _column(self, line: int, offset: int) -> int:
        """Return a column in characters, from the syntax tree's in bytes."""
        return len(self.lines[line - 1].encode()[:offset].decode())


def _imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name in node.names:
                yield name.asname or name.name


def _is_aside(test: ast.expr) -> bool:
    """Return whether a block runs only for type checkers or in a script."""
    return any(
        isinstance(node, ast.Name) and node.id in ("TYPE_CHECKING", "__name__")
        for node in ast.walk(test)
    )


def _joins(node: ast.BinOp) -> bool:
    """Return whether an operator joins strings or types and has no replacement."""
    for side in (node.left, node.right):
        if isinstance(side, ast.JoinedStr):
            return True
        if isinstance(side, ast.Constant) and isinstance(side.value, str | None):
            return True
        if isinstance(side, ast.Name) and side.id in ("int", "str", "bool", "bytes"):
            return True
    return False


def _statement(parents: Sequence[ast.AST]) -> int:
    """Return the ID of the innermost statement."""
    return next(id(node) for node in reversed(parents) if isinstance(node, ast.stmt))


def _without_comments(source: str) -> str:
    """Replace C comments and strings by blanks, keeping all columns."""
    return _C_COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)


def _c_mutations(path: str, source: str) -> Iterator[Mutation]:
    for line, text in enumerate(_without_comments(source).splitlines(), 1):
        if not text.startswith("\t"):
            continue
        for match in _C_OPERATOR.finditer(text):
            for new in C_OPERATORS[match[0]]:
                kind = f"{match[0]} -> {new}"
                yield Mutation(path, line, *match.span(), new, kind)
        for match in _C_NUMBER.finditer(text):
            yield Mutation(path, line, *match.span(), f"({match[0]} + 1)", "off by one")
        for match in _C_WORD.finditer(text):
            new = {"break": "continue", "continue": "break"}.get(match[0], "")
            kind = "continue or break" if new else "not dropped"
            yield Mutation(path, line, *match.span(), new, kind)
