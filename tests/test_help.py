# SPDX-License-Identifier: LGPL-2.1-or-later

"""``msa help``: topics, guides and what commands print."""

import subprocess
import sys
from pathlib import Path

import pytest

from msatools import frontdoor
from msatools.help.topics import topics
from msatools.registry import GROUPS, NAMES
from msatools.render.blocks import Block, Span, Table, Text
from msatools.render.legend import markdown_blocks
from tests.docs.pages import DOCS

SCRIPT = Path(sys.executable).with_name("msa")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert frontdoor.main(["help", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_topics(capsys: pytest.CaptureFixture[str]) -> None:
    """All guides and commands, each in a line with what it is about."""
    out = shown(capsys)
    guides = {path.stem for path in (DOCS / "guides").glob("*.md")}
    assert len(guides) > 8
    assert {*NAMES, *GROUPS, "columns", *guides} <= topics().keys()
    for topic, about in topics().items():
        assert f"\n  {topic:24}{about.split()[0]}" in out
    assert out == shown(capsys, "--help")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("xyzzy", "help: unknown topic 'xyzzy'; choose from "),
        ("it-hang", "; did you mean it-hangs?"),
        ("cpus locks", "locks: a second topic, after cpus"),
        ("a\x1bb", r"unknown topic 'a\x1bb'"),
    ],
)
def test_unknown_topic(
    capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert frontdoor.main(["help", *words.split(" ")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("msa: ")
    assert message in err
    assert err.count("\n") == 1


def test_installed_script() -> None:
    """A file of that name is still a target."""
    done = subprocess.run([SCRIPT, "help", "it-hangs"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("It hangs\n")


def test_pages_that_are_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy of the package alone has the commands' own words."""
    monkeypatch.setattr("msatools.help.topics._PLACES", (Path("/nowhere"),))
    assert "it-hangs" not in topics()
    assert shown(capsys, "locks") == "All options: msa locks --help\n"
    assert "KLK" in shown(capsys, "columns")


PAGE = """\
# Title

A line with `code`, **bold** and [a link](other.md#part)
and more.

- first
  and its end
- second

| A | B \\| C |
|---|---|
| `x` | y |

```console
$ msa-locks | more
```
"""


def words_of(block: Block) -> str:
    assert isinstance(block, Text)
    return "".join(c.text if isinstance(c, Span) else c for c in block.spans)


def test_markdown() -> None:
    found = [*markdown_blocks(PAGE, lambda link: f"see {link}")]
    (table,) = (block for block in found if isinstance(block, Table))
    assert [column.header for column in table.columns] == ["A", "B | C"]
    assert table.rows == [["x", "y"]]
    lines = [words_of(block) for block in found if isinstance(block, Text)]
    assert [line for line in lines if line] == [
        "Title",
        "A line with code, bold and a link (see other.md#part) and more.",
        "- first and its end",
        "- second",
        "    $ msa-locks | more",
    ]
