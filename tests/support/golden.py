# SPDX-License-Identifier: LGPL-2.1-or-later

"""
A pytest plugin that compares rendered text with golden files.

``make golden`` (``pytest --record-golden``) rewrites the files; review the changes with
git. A test whose golden file does not exist fails.
"""

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

DIRECTORY = Path(__file__).parents[1] / "golden"

Golden = Callable[[str, Iterable[str] | str], None]
"""Called with the name of a file below ``tests/golden`` and a text or its lines."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-golden",
        action="store_true",
        help="write the golden files anew instead of comparing with them",
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """With ``--record-golden``, run only tests that have golden files."""
    if config.getoption("--record-golden"):
        items[:] = [i for i in items if "golden" in getattr(i, "fixturenames", ())]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Return a function that compares text with a golden file, less trailing blanks."""
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
