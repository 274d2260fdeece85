# SPDX-License-Identifier: LGPL-2.1-or-later

"""The documentation: links lead somewhere, commands are accepted, examples are true."""

import builtins
import doctest
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from drgn import cli
from drgn.commands import run_command

from fixtures import lab
from msatools.program import Opened, TargetError, TargetSpec
from msatools.registry import load
from tests.docs.examples import MARK, matches, output_of
from tests.docs.forms import Form, Formed, forms_of, has_forms
from tests.docs.index import INDEX, with_index
from tests.docs.pages import ROOT, Call, Example, Page, calls_in, pages
from tests.support.calls import call, demo

PAGES = pages()
MOST_LINES_OF_README = 250
LANGUAGES = {"c", "console", "diff", "json", "pycon", "python", "sh", "sql", "text"}
UNTESTED = {
    "docs/commands/cpus-plan.md",
    "docs/commands/fleet.md",
    "docs/guides/fingerprints.md",
    "docs/guides/reading-fleet.md",
    "docs/performance.md",
}
"""Pages with blocks of plain ``text``: a script to read, runs on many dumps, a pipe of
other programs, and what `make bench` measured on some machine. `tests/live`,
`tests/fleet` and `tests/report` test what the first three say."""

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)
COMMAND = re.compile(r"^>>> %(.*)$", re.M)
QUERY = re.compile(r"^msa-(\w+) .*--json.*\| jq (.+?)(?: {2,}#.*)?$", re.M)
KEY = re.compile(r"\.([a-z_]+)")

DEMO = [
    pytest.param(example, id=f"{page.name}: {example.line}")
    for page in PAGES
    for block in page.consoles
    if block.is_of_demo
    for example in block.examples
]
LAB = [
    pytest.param(block.scenario, example, id=f"{page.name}: {example.line}")
    for page in PAGES
    for block in page.consoles
    if block.scenario
    for example in block.examples
]
LIVE = [
    pytest.param(block.live, example, id=f"{page.name}: {number}")
    for page in PAGES
    for number, block in enumerate(page.consoles)
    if block.live and has_forms(block.live)
    for example in block.examples
]
"""What tests/live/test_cpus.py holds against a guest that runs."""
PROMPTS = [
    pytest.param(page, id=page.name)
    for page in PAGES
    if any(block.language == "pycon" for block in page.blocks)
]
QUERIES = sorted({each for page in PAGES for each in QUERY.findall(page.text)})
CALLS = sorted({each for page in PAGES for each in page.calls}, key=str)


@pytest.mark.parametrize("example", DEMO)
def test_prints_what_is_shown(example: Example) -> None:
    output = output_of(example.line)
    if MARK.search(example.shown):
        assert matches(example, output), output
    else:
        assert output == example.shown


@pytest.mark.parametrize(("scenario", "example"), LAB)
def test_dump_has_the_forms_shown(scenario: str, example: Example) -> None:
    """A guest that is booted anew has other PIDs and times, and sleeps elsewhere."""
    printed = Formed(output_of(example.line, lab.build(scenario).kept), scenario)
    shown = Formed(example.shown, scenario)
    assert not printed.lacks(shown), printed.text
    # So that `make docs` can write it.
    renewed = shown.renewed(printed)
    assert renewed is not None, printed.text
    assert {*Formed(renewed, scenario).places} == {*shown.places}


@pytest.mark.parametrize(("scenario", "example"), LAB + LIVE)
def test_all_that_is_shown_has_one_form(scenario: str, example: Example) -> None:
    """A line without a form may be so by chance; two forms are not told apart."""
    shown = Formed(example.shown, scenario)
    assert shown.places
    assert {count: shown.lines_of(count) for count in (0, 2)} == {0: [], 2: []}


@pytest.mark.parametrize("scenario", sorted({each.values[0] for each in LAB + LIVE}))
def test_forms_say_something(scenario: str) -> None:
    shown: set[Form] = set()
    for of, example in (each.values for each in LAB + LIVE):
        if of == scenario:
            shown |= {*Formed(example.shown, scenario).places}
    for form in forms_of(scenario):
        assert form in shown, form
        assert not form.wordless, form
        assert not [*form.places("")], form


@pytest.mark.parametrize("page", PROMPTS)
def test_prompt_prints_what_is_shown(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a page are one session at drgn's prompt."""
    text = "\n".join(block.text for block in page.blocks if block.language == "pycon")
    text = COMMAND.sub(r'>>> _ = run_command(prog, "\1")', text)
    names = {"prog": demo().prog, "run_command": run_command}
    session = doctest.DocTestParser().get_doctest(text, names, page.name, None, 0)
    assert session.examples
    monkeypatch.chdir(ROOT)
    # doctest shows values by this one, drgn's prompt by its own.
    monkeypatch.setattr(sys, "__displayhook__", cli._displayhook)
    monkeypatch.setattr(builtins, "_", None, raising=False)
    printed: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(
        session, out=printed.append
    )
    assert not result.failed, "".join(printed)


@pytest.mark.parametrize("asked", CALLS, ids=str)
def test_command_is_accepted(
    asked: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(spec: TargetSpec) -> Opened:
        raise TargetError("not opened")

    monkeypatch.chdir(tmp_path)
    ran = call(load(asked.name), *asked.words, opening=refuse)
    assert ran.status != 2, ran.err


@pytest.mark.parametrize(("name", "query"), QUERIES)
def test_queries_have_keys_of_the_output(name: str, query: str) -> None:
    """``jq`` prints null for a key that is not there."""
    schema = json.loads((ROOT / f"docs/schema/{name}-1.json").read_text())
    assert {*KEY.findall(query)} - {*property_names(schema)} == set()


def property_names(schema: object) -> Iterator[str]:
    """Yield the names of all properties in a JSON Schema."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        schema = [*schema.values()]
    if isinstance(schema, list):
        for each in schema:
            yield from property_names(each)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Page) -> None:
    for link in LINK.findall(page.prose):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub names them."""
    headings = HEADING.findall(text)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_are_of_a_kind_that_is_tested(page: Page) -> None:
    languages = {block.language for block in page.blocks}
    assert languages <= LANGUAGES
    assert "text" not in languages or page.name in UNTESTED


def test_one_example_of_a_fleet() -> None:
    """The guide explains what the command's page shows."""
    (shown,) = Page(ROOT / "docs/guides/reading-fleet.md").blocks
    (first, *_) = Page(ROOT / "docs/commands/fleet.md").blocks
    assert shown.text in first.text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scenarios_are_of_the_lab(page: Page) -> None:
    """What is shown of a guest that runs (``live=``) is not run again here."""
    for block in page.blocks:
        for word in block.info.split()[1:]:
            key, _, name = word.partition("=")
            assert key in ("lab", "live")
            assert name in lab.scenarios()


def test_index_lists_every_page() -> None:
    """`make docs` writes the list."""
    text = INDEX.read_text()
    assert with_index(text) == text
    linked = {(INDEX.parent / link).resolve() for link in LINK.findall(text)}
    assert {page.path for page in PAGES} - linked <= {INDEX, ROOT / "README.md"}


def test_readme_is_short() -> None:
    readme = PAGES[0]
    assert readme.name == "README.md"
    assert readme.text.count("\n") <= MOST_LINES_OF_README


def test_readme_shows_what_make_demo_prints() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (line,) = re.findall(r"\$\(BIN\)/(msa-memstat .*)", makefile)
    (asked,) = calls_in(line)
    shown = [
        example.shown
        for block in PAGES[0].consoles
        if block.is_of_demo
        for example in block.examples
    ]
    assert call(load(asked.name), *asked.words).out in shown
