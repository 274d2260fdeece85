# SPDX-License-Identifier: LGPL-2.1-or-later

"""The documentation's pages, their blocks, and the commands that these show."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from msatools.registry import NAMES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

OWN_TESTS = {
    "docs/adding-a-command.md",
    "docs/libkdumpfile.md",
    "docs/schema/README.md",
}
"""Pages whose blocks have tests of their own, or need programs that are not ours."""

_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)
_PROMPT = re.compile(r"^[$#] (.+)$")
_CALL = re.compile(rf"^msa[- ]({'|'.join(NAMES)})$")
_INLINE = re.compile(r"`(msa-[^`]+)`")
_SHELL = re.compile(r"[|&;()<>]+")


@dataclass(frozen=True)
class Call:
    """A command of msatools, as a reader would type it."""

    name: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Example:
    """A command line of a ``console`` block, and what the block shows of its output."""

    line: str
    shown: str


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Its first line is a language and words, such as ``console lab=locks-6.12``.
    """

    info: str
    text: str

    @property
    def language(self) -> str:
        return self.info.split()[0] if self.info else ""

    @property
    def scenario(self) -> str | None:
        """The lab's scenario whose dump a ``console`` block shows."""
        return self._value("lab")

    @property
    def live(self) -> str | None:
        """The lab's scenario that was running when a ``console`` block was shown."""
        return self._value("live")

    def _value(self, key: str) -> str | None:
        words = (word.partition("=") for word in self.info.split()[1:])
        return next((value for found, _, value in words if found == key), None)

    @property
    def is_of_demo(self) -> bool:
        """Whether its commands are run on the demo core."""
        return self.info == "console"

    @property
    def examples(self) -> Iterator[Example]:
        """The command lines of a ``console`` block.

        :raises ValueError: if it does not begin with one
        """
        line, shown = "", ""
        for text in self.text.splitlines(keepends=True):
            if prompt := _PROMPT.match(text):
                if line:
                    yield Example(line, shown)
                line, shown = prompt[1], ""
            elif line:
                shown += text
            else:
                raise ValueError(f"no command before {text!r}")
        yield Example(line, shown)


@dataclass(frozen=True)
class Page:
    """A page in Markdown."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @property
    def title(self) -> str:
        """The first line, without its mark."""
        return self.text.partition("\n")[0].removeprefix("# ")

    @property
    def blocks(self) -> list[Block]:
        return [Block(*found) for found in _FENCE.findall(self.text)]

    @property
    def prose(self) -> str:
        """The text without its blocks."""
        return _FENCE.sub("", self.text)

    @property
    def consoles(self) -> list[Block]:
        """The blocks that show what commands print."""
        is_tested = self.name not in OWN_TESTS
        return [b for b in self.blocks if b.language == "console" and is_tested]

    @property
    def calls(self) -> Iterator[Call]:
        """All commands of msatools on the page, in its blocks and in its prose."""
        for block in self.blocks:
            if block.language == "console":
                for example in block.examples:
                    yield from calls_in(example.line)
            elif block.language == "sh":
                for line in block.text.splitlines():
                    yield from calls_in(line)
        for code in _INLINE.findall(self.prose):
            yield from calls_in(" ".join(code.split()))


def pages() -> list[Page]:
    """Return all pages, the README first."""
    return [Page(path) for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))]


def calls_in(line: str) -> Iterator[Call]:
    """Yield the commands of msatools in a line of the shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.commenters = "#"
    lexer.whitespace_split = True
    command: list[str] = []
    for word in (*lexer, ";"):
        if not _SHELL.fullmatch(word):
            command.append(word)
            continue
        yield from _call(command)
        command = []


def _call(command: list[str]) -> Iterator[Call]:
    if command[:1] == ["msa"] and len(command) > 1:
        command = [f"msa-{command[1]}", *command[2:]]
    if command and (named := _CALL.match(command[0])):
        yield Call(named[1], tuple(command[1:]))
