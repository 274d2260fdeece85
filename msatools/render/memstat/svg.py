# SPDX-License-Identifier: LGPL-2.1-or-later

"""A picture as SVG 1.1: one path for each colour, and text."""

from collections.abc import Iterator
from xml.sax.saxutils import escape as xml

from msatools.render.blocks import escape
from msatools.render.memstat.picture import PAPER, Box, Label, Picture

_FONTS = "system-ui, 'DejaVu Sans', Helvetica, sans-serif"


def svg(picture: Picture) -> bytes:
    """Draw a picture."""
    return ("\n".join(_lines(picture)) + "\n").encode()


def _lines(picture: Picture) -> Iterator[str]:
    width, height = picture.width, picture.height
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{_FONTS}" '
        'shape-rendering="crispEdges">'
    )
    yield f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
    for colour, boxes in picture.boxes.items():
        yield f'<path fill="{colour}" d="{"".join(map(_path, boxes))}"/>'
    yield from map(_text, picture.labels)
    yield "</svg>"


def _path(box: Box) -> str:
    return f"M{box.x},{box.y}h{box.width}v{box.height}h-{box.width}z"


def _text(label: Label) -> str:
    return (
        f'<text x="{label.x}" y="{label.y}" font-size="{label.size}" '
        f'text-anchor="{label.anchor}" dominant-baseline="central" '
        f'fill="{label.colour}">{xml(escape(label.text))}</text>'
    )
