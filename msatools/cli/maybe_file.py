# SPDX-License-Identifier: LGPL-2.1-or-later

"""Options with an optional file."""

import argparse
from collections.abc import Sequence
from typing import Any

HERE = "-"
"""Value of a :class:`MaybeFile` option without a file: standard output."""


_PICTURES = (
    *(".avif", ".bmp", ".dot", ".eps", ".gif", ".htm", ".html", ".jpeg", ".jpg"),
    *(".pdf", ".pgm", ".png", ".ppm", ".ps", ".svg", ".svgz", ".tif", ".tiff", ".webp"),
)
"""Suffixes of files that are not dumps."""


class MaybeFile(argparse.Action):
    """An option with an optional file, which is recognized by its suffix.

    Another word after the option is a positional argument. It is refused if it has the
    suffix of another kind of picture, or if there is another target.
    """

    def __init__(self, endings: Sequence[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.endings = tuple(endings)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values and not self.names_file(values):
            parser.error(self.refusal(values))
        setattr(namespace, self.dest, values or HERE)

    def names_file(self, word: str) -> bool:
        return word.lower().endswith(self.endings)

    def may_name_file(self, word: str) -> bool:
        """Return whether a word is meant as a file, perhaps of the wrong kind."""
        return self.names_file(word) or word.lower().endswith(_PICTURES)

    def refusal(self, word: str) -> str:
        known = " or ".join(self.endings)
        return f"{self.option_strings[0]}: not a file that ends in {known}: {word}"
