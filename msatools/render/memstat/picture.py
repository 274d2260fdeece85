# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pictures as shapes, and as files: SVG, or PNG by Pillow (the extra ``pictures``)."""

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal
from xml.sax.saxutils import escape as xml

from msgspec import Struct, field

from msatools.render.blocks import escape

if TYPE_CHECKING:
    from PIL import ImageDraw

Anchor = Literal["start", "middle", "end"]

BLACK = "#222222"
GREY = "#777777"
PAPER = "#ffffff"


class Box(Struct, frozen=True):
    """A rectangle, in pixels."""

    x: int
    y: int
    width: int
    height: int


class Label(Struct, frozen=True):
    """A line of text; each format escapes it as needed."""

    x: int
    y: int
    """y of its middle."""

    text: str
    size: int = 13
    anchor: Anchor = "start"
    colour: str = BLACK
    title: str = ""
    """Text to show while a pointer is on the label, if the format can."""


class Picture(Struct, frozen=True):
    """Boxes by colour, the first at the bottom, and labels on top."""

    width: int
    height: int
    boxes: Mapping[str, Sequence[Box]]
    """Boxes by ``#rrggbb``; boxes of one colour do not overlap."""

    labels: Sequence[Label]

    title: str = ""
    titles: Mapping[str, str] = field(default_factory=dict)
    """Texts to show while a pointer is on a box, by colour, if the format can."""


_FONTS = "system-ui, 'DejaVu Sans', Helvetica, sans-serif"


def svg(picture: Picture) -> bytes:
    """Draw a picture as SVG 1.1: a path for each colour, and text."""
    return ("\n".join(_svg_lines(picture)) + "\n").encode()


def _svg_lines(picture: Picture) -> Iterator[str]:
    width, height = picture.width, picture.height
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{_FONTS}" '
        'shape-rendering="crispEdges">'
    )
    yield _svg_title(picture.title)
    yield f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
    for colour, boxes in picture.boxes.items():
        title = _svg_title(picture.titles.get(colour, ""))
        yield f'<path fill="{colour}" d="{"".join(map(_path, boxes))}">{title}</path>'
    yield from map(_svg_text, picture.labels)
    yield "</svg>"


def _path(box: Box) -> str:
    return f"M{box.x},{box.y}h{box.width}v{box.height}h-{box.width}z"


def _svg_text(label: Label) -> str:
    return (
        f'<text x="{label.x}" y="{label.y}" font-size="{label.size}" '
        f'text-anchor="{label.anchor}" dominant-baseline="central" '
        f'fill="{label.colour}">{_svg_title(label.title)}'
        f"{xml(escape(label.text))}</text>"
    )


def _svg_title(text: str) -> str:
    """Return the element whose text browsers show while a pointer is on its parent."""
    return f"<title>{xml(escape(text))}</title>" if text else ""


_SCALE = 2
"""Pixels of a PNG for one pixel of the picture, so that text is sharp."""

_ANCHORS = {"start": "lm", "middle": "mm", "end": "rm"}


def png(picture: Picture) -> bytes:
    """Draw a picture as PNG.

    :raises ModuleNotFoundError: if Pillow is not installed
    """
    # Pillow is slow to import, and may be missing.
    from PIL import Image, ImageDraw

    size = (picture.width * _SCALE, picture.height * _SCALE)
    image = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(image)
    for colour, boxes in picture.boxes.items():
        for box in boxes:
            x, y = box.x * _SCALE, box.y * _SCALE
            # Pillow's coordinates of the last pixel are inclusive.
            last = (x + box.width * _SCALE - 1, y + box.height * _SCALE - 1)
            draw.rectangle(((x, y), last), fill=colour)
    for label in picture.labels:
        _png_text(draw, label)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _png_text(draw: "ImageDraw.ImageDraw", label: Label) -> None:
    from PIL import ImageFont

    # The font of Pillow has only ASCII.
    words = escape(label.text).encode("ascii", "replace").decode()
    draw.text(
        (label.x * _SCALE, label.y * _SCALE),
        words,
        fill=label.colour,
        font=ImageFont.load_default(label.size * _SCALE),
        anchor=_ANCHORS[label.anchor],
    )
