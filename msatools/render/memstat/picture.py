# SPDX-License-Identifier: LGPL-2.1-or-later

"""A picture as shapes, before it is known in which format it is drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Anchor = Literal["start", "middle", "end"]

BLACK = "#222222"
GREY = "#777777"
PAPER = "#ffffff"


@dataclass(frozen=True)
class Box:
    """A rectangle, in pixels."""

    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True)
class Label:
    """A line of text, which printers escape as their format needs it."""

    x: int
    y: int
    """Of its middle."""

    text: str
    size: int = 13
    anchor: Anchor = "start"
    colour: str = BLACK


@dataclass(frozen=True)
class Picture:
    """Boxes by colour, the first at the bottom, and text over them."""

    width: int
    height: int
    boxes: Mapping[str, Sequence[Box]]
    """By ``#rrggbb``; those of one colour do not overlap."""

    labels: Sequence[Label]
