# SPDX-License-Identifier: LGPL-2.1-or-later

"""Write the documentation anew: ``make docs``.

The index gets a list of all pages, and each example on the demo core the output of its
command. With ``--lab`` those on dumps of the lab get the numbers of the dump that there
is now: their forms stay (``forms``). Examples on the demo core that are shown in part
are left alone. All that no longer match are named.
"""

import sys

from fixtures import lab
from tests.docs.examples import MARK, matches, output_of
from tests.docs.forms import Formed
from tests.docs.index import INDEX, with_index
from tests.docs.pages import Example, Page, pages


def main(*, with_lab: bool) -> int:
    """Write all pages; return 1 if an example has to be written by hand."""
    INDEX.write_text(with_index(INDEX.read_text()))
    outdated = [wrong for page in pages() for wrong in _renew(page, with_lab)]
    for wrong in outdated:
        print(f"{wrong}\n  prints something else than is shown: edit it")
    return 1 if outdated else 0


def _renew(page: Page, with_lab: bool) -> list[str]:
    """Write the outputs of a page; return the examples that are left alone."""
    text, wrong = page.text, []
    for block in page.consoles:
        if not block.is_of_demo and not (with_lab and block.scenario):
            continue
        for example in block.examples:
            new = _renewed(example, block.scenario)
            if new is None:
                wrong.append(f"{page.name}: {example.line}")
            else:
                text = _replace(text, example, new)
    if text != page.text:
        page.path.write_text(text)
    return wrong


def _renewed(example: Example, scenario: str | None) -> str | None:
    """Return what is to be shown of an example's output; None if it does not fit."""
    if scenario:
        output = output_of(example.line, lab.build(scenario).kept)
        return Formed(example.shown, scenario).renewed(Formed(output, scenario))
    output = output_of(example.line)
    if MARK.search(example.shown):
        return example.shown if matches(example, output) else None
    return output


def _replace(text: str, example: Example, output: str) -> str:
    old = f"$ {example.line}\n{example.shown}"
    return text.replace(old, f"$ {example.line}\n{output}", 1)


if __name__ == "__main__":
    sys.exit(main(with_lab="--lab" in sys.argv[1:]))
