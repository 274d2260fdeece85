# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the demos are asked, and how their answers are compared."""

from collections.abc import Iterator
from pathlib import Path

from fixtures.demo import QUESTIONS
from fixtures.demo.questions import command, comparable
from msatools.registry import GROUPS

COMMANDS = Path(__file__).parents[2] / "commands"


def test_every_command_is_asked_with_every_option_of_its_own() -> None:
    names = {path.stem for path in COMMANDS.glob("[!_]*.py")} - {*GROUPS}
    asked = [question.split() for question in QUESTIONS]
    assert {words[0] for words in asked} == names
    for name in names:
        used = {word for words in asked if words[0] == name for word in words[1:]}
        bare = [words for words in asked if not any(w[0] == "-" for w in words)]
        assert name in {words[0] for words in bare}
        # Of a dump there are no intervals, within which -F takes samples; --leaks and
        # --unattributed read all of some pages, by which the cores would grow by half;
        # what --map answers is as large as a core; --diff looks at no dump; and --html
        # and --textfile write what is shown to a file.
        unasked = {"-F", "--leaks", "--unattributed", "--map", "--diff", "--html"}
        unasked |= {"--textfile"}
        assert used >= (set(options_of(name)) | {"-v"}) - unasked


def options_of(name: str) -> Iterator[str]:
    for option in command(name).arguments:
        for choice in getattr(option, "arguments", (option,)):
            yield choice.args[0]


def test_how_it_was_read_is_not_compared() -> None:
    report = {"target": {"path": "x"}, "coverage": {"reads": 1, "lost": 0}, "pages": 2}
    assert comparable(report) == {"coverage": {"lost": 0}, "pages": 2}
