# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Rendered text held against files that are reviewed as text: a pytest plugin.

``make golden`` (``pytest --record-golden``) writes the files anew, and git shows what
has changed. A test that names a file that is not there fails.
"""

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

DIRECTORY = Path(__file__).parents[1] / "golden"

Golden = Callable[[str, Iterable[str] | str], None]
"""Takes the name of a file below ``tests/golden`` and the text, or its lines."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-golden",
        action="store_true",
        help="write the golden files anew instead of comparing with them",
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Run what has golden files alone, if these are to be recorded."""
    if config.getoption("--record-golden"):
        items[:] = [i for i in items if "golden" in getattr(i, "fixturenames", ())]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare text with a golden file, trailing blanks aside."""
    record = bool(request.config.getoption("--record-golden"))

    def compare(name: str, text: Iterable[str] | str) -> None:
        lines = text.splitlines() if isinstance(text, str) else text
        found = "".join(f"{line.rstrip()}\n" for line in lines)
        path = DIRECTORY / f"{name}.txt"
        if record:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found)
            return
        if not path.exists():
            pytest.fail(f"no {path}: record it with `make golden`, and read it")
        wanted = path.read_text()
        if found != wanted:
            changes = difflib.unified_diff(
                wanted.splitlines(), found.splitlines(), str(path), "found", lineterm=""
            )
            pytest.fail("\n".join(changes), pytrace=False)

    return compare
