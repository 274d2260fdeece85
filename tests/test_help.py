# SPDX-License-Identifier: LGPL-2.1-or-later

"""``msa help``: topics, guides and what commands print."""

import subprocess
import sys
from pathlib import Path

import pytest

from msatools import frontdoor
from msatools.help.topics import pages_of, topics
from msatools.legends import legend_of
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


@pytest.mark.parametrize("topic", topics())
def test_page_of_each(capsys: pytest.CaptureFixture[str], topic: str) -> None:
    """Without the marks of Markdown; what is wider is an output that it shows."""
    out = shown(capsys, topic)
    assert len(out.splitlines()) > 10
    for line in out.splitlines():
        if not line.startswith("    "):
            assert len(line) <= 80, line
            assert not line.startswith(("```", "|", "#")), line
            assert "](" not in line, line


def test_guide(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "it-hangs")
    assert out.startswith("It hangs\n\n")
    assert "    $ msa-locks vmcore" in out


def test_name_of_a_guide_and_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "zombies")
    both = [
        page.title
        for folder in ("commands", "guides")
        for page in pages_of(folder)
        if page.name == "zombies"
    ]
    assert len(both) == 2
    assert out.startswith(both[0])
    assert f"\n{both[1]}\n" in out
    assert shown(capsys, "msa-zombies") == out
    assert out.endswith("All options: msa zombies --help\n")


def test_columns_of_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "columns")
    for name in NAMES:
        assert f"msa-{name}\n" in out
        for group in legend_of(name):
            assert f"\n{group.title}\n" in out


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


def test_file_of_that_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = []
    monkeypatch.setattr("msatools.console.run", lambda *words: ran.append(words) or 7)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "help").touch()
    assert frontdoor.main(["help"]) == 7
    assert ran == [("report", ["help"])]


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
