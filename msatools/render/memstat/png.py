# SPDX-License-Identifier: LGPL-2.1-or-later

"""A picture as PNG, by Pillow (the extra ``pictures``)."""

import io

from PIL import Image, ImageDraw, ImageFont

from msatools.render.blocks import escape
from msatools.render.memstat.picture import PAPER, Label, Picture

_SCALE = 2
"""Pixels of the file for one of the picture, so that text is sharp."""

_ANCHORS = {"start": "lm", "middle": "mm", "end": "rm"}


def png(picture: Picture) -> bytes:
    """Draw a picture."""
    size = (picture.width * _SCALE, picture.height * _SCALE)
    image = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(image)
    for colour, boxes in picture.boxes.items():
        for box in boxes:
            x, y = box.x * _SCALE, box.y * _SCALE
            # Pillow's boxes have their last pixel within.
            last = (x + box.width * _SCALE - 1, y + box.height * _SCALE - 1)
            draw.rectangle(((x, y), last), fill=colour)
    for label in picture.labels:
        _text(draw, label)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _text(draw: ImageDraw.ImageDraw, label: Label) -> None:
    # The font that comes with Pillow has the letters of ASCII.
    words = escape(label.text).encode("ascii", "replace").decode()
    draw.text(
        (label.x * _SCALE, label.y * _SCALE),
        words,
        fill=label.colour,
        font=ImageFont.load_default(label.size * _SCALE),
        anchor=_ANCHORS[label.anchor],
    )
