# SPDX-License-Identifier: LGPL-2.1-or-later

"""Draws a map of memory as a picture: SVG, or PNG by Pillow (extra ``pictures``)."""

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal
from xml.sax.saxutils import escape as xml

from msgspec import Struct, field

from msatools.memory.map import MemoryMap
from msatools.render.blocks import escape
from msatools.render.memstat.map import (
    FREE_COLOUR,
    LEVELS,
    LOOKS,
    Band,
    LegendLine,
    MapRow,
    Shades,
    bands,
    begins_section,
    legend,
    mix,
    runs,
    section_columns,
    section_words,
    shades,
)
from msatools.reports.units import size

if TYPE_CHECKING:
    from PIL import ImageDraw

# --- Pictures as shapes, and as files: SVG, or PNG by Pillow (the extra pictures).


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


# --- Draws a map of memory as a picture.


COLUMNS = 256
_CELL_WIDTH = 4
_MAP_WIDTH = COLUMNS * _CELL_WIDTH
_MAP_HEIGHT = 1024
_MOST_CELL_HEIGHT = 24
_LEFT, _TOP = 150, 84
_BAND_GAP, _HOLE_GAP = 3, 14
_ZONE_WIDTH, _LEGEND_WIDTH = 190, 430
_TEXT_STEP = 20
"""Distance of lines of text, in pixels."""

_ADDRESS_HEIGHT, _ADDRESS_STEP = 14, 36
_TICK = 6
_STEP_WIDTH = 36
_FRAME = "#bbbbbb"

_FREE_PART = 0.28
"""Strength of the palest shade, as a fraction of the full colour."""


def picture(memory: MemoryMap, page_size: int, release: str) -> Picture:
    """
    Draw a map, a legend, zones and addresses.

    :param release: Release of the kernel.
    """
    drawing = _Drawing(memory, page_size)
    title = drawing.add_title(release)
    bottom = drawing.add_map()
    lowest = drawing.add_legend()
    width = _LEFT + _MAP_WIDTH + _ZONE_WIDTH + _LEGEND_WIDTH
    height = max(bottom, lowest) + 2 * _TEXT_STEP
    titles = dict(_titles(memory, page_size))
    return Picture(width, height, drawing.boxes, drawing.labels, title, titles)


def _titles(memory: MemoryMap, page_size: int) -> Iterator[tuple[str, str]]:
    """Yield each colour of a cell, and the text that explains it."""
    lines = legend(memory)
    free = [_amount(line, page_size) for line in lines if line.is_free]
    yield FREE_COLOUR, "; ".join(free) or "free"
    for line in lines:
        if line.is_free:
            continue
        for level in range(1, LEVELS + 1):
            used = f"at most {level}/{LEVELS} of these cells are used"
            if level == LEVELS:
                used = f"more than {level - 1}/{LEVELS} of these cells are used"
            title = f"{_amount(line, page_size)}; {used}"
            yield _pale(line.style.colour, level), title


def _amount(line: LegendLine, page_size: int) -> str:
    return f"{line.name}: {line.pages:,} pages, {size(line.pages * page_size)}"


class _Drawing(Struct):
    memory: MemoryMap
    page_size: int
    boxes: dict[str, list[Box]] = field(default_factory=lambda: {_FRAME: []})
    """Boxes by colour; frames come first, below the boxes that they surround."""

    labels: list[Label] = field(default_factory=list)

    def add_title(self, release: str) -> str:
        pages = int(self.memory.cells.counts.sum())
        cell = size(self.memory.cell_pages * self.page_size)
        title = f"Physical memory of {release}: {size(pages * self.page_size)}"
        self.labels.append(Label(_LEFT, 28, title, size=20))
        row = size(self.memory.cell_pages * self.page_size * COLUMNS)
        sections = section_words(self.memory, COLUMNS, "at ticks", "at ticks")
        words = f"{cell} a cell, {row} a row; {sections}"
        self.labels.append(Label(_LEFT, 54, words, colour=GREY))
        return title

    def add_map(self) -> int:
        """Draw the rows, addresses and zones; return the y after them."""
        all_bands = bands(self.memory, COLUMNS)
        shown = shades(self.memory)
        height = _cell_height(sum(len(band.rows) for band in all_bands))
        y = _TOP
        self._add_ruler(y)
        step = _address_step(height)
        next_address = next_zone = y
        for band in all_bands:
            start = y
            for row in band.rows:
                if row.hole_pages:
                    y += _HOLE_GAP
                    start = y if row is band.rows[0] else start
                self._add_row(row, shown, y, height)
                number = row.pfn // self.memory.cell_pages // COLUMNS
                wanted = row is band.rows[0] or not number % step
                if wanted and y >= next_address:
                    next_address = y + _ADDRESS_HEIGHT
                    self._add_address(row, y + height // 2)
                if begins_section(self.memory, row, COLUMNS):
                    self._add(GREY, Box(_LEFT - _TICK - 2, y, _TICK, 1))
                y += height
            next_zone = self._add_zone(band, start, y, next_zone)
            y += _BAND_GAP
        return y

    def _add(self, colour: str, box: Box) -> None:
        self.boxes.setdefault(colour, []).append(box)

    def _add_ruler(self, y: int) -> None:
        step = section_columns(self.memory, COLUMNS)
        if step is not None:
            for column in range(0, COLUMNS, step):
                x = _LEFT + column * _CELL_WIDTH
                self._add(GREY, Box(x, y - _TICK - 2, 1, _TICK))

    def _add_row(self, row: MapRow, shown: Shades, y: int, height: int) -> None:
        for run in runs(row, shown):
            x = _LEFT + run.column * _CELL_WIDTH
            box = Box(x, y, run.length * _CELL_WIDTH, height)
            self._add(_colour(run.code, run.level), box)

    def _add_address(self, row: MapRow, y: int) -> None:
        address = f"{row.first_pfn * self.page_size:#_x}"
        self.labels.append(
            Label(_LEFT - 14, y, address, size=12, anchor="end", colour=GREY)
        )

    def _add_zone(self, band: Band, start: int, end: int, lowest: int) -> int:
        """Draw a bracket with a label; return the minimum y of the next label."""
        x = _LEFT + _MAP_WIDTH + 8
        self._add(_FRAME, Box(x, start, 3, end - start))
        y = max((start + end) // 2, lowest + _TEXT_STEP // 2)
        if not band.label:
            return lowest
        self.labels.append(Label(x + 12, y, band.label))
        return y + _TEXT_STEP // 2

    def add_legend(self) -> int:
        """Draw the legend; return the y of its end."""
        left = _LEFT + _MAP_WIDTH + _ZONE_WIDTH
        right = left + _LEGEND_WIDTH - 30
        y = _TOP
        columns = (right - 160, right - 70, right)
        for x, word in zip(columns, ("pages", "size", "share"), strict=True):
            self.labels.append(Label(x, y, word, 12, "end", GREY))
        for line in legend(self.memory):
            y += _TEXT_STEP
            self._add_sample(left, y, line.style.colour)
            title = _amount(line, self.page_size)
            self.labels.append(Label(left + 24, y, line.name, title=title))
            amounts = (
                f"{line.pages:,}",
                size(line.pages * self.page_size),
                f"{100 * line.share:.1f} %",
            )
            for x, amount in zip(columns, amounts, strict=True):
                self.labels.append(Label(x, y, amount, anchor="end"))
        y += 2 * _TEXT_STEP
        for words in (
            "A cell has the colour of its largest class",
            "that is not free",
        ):
            self.labels.append(Label(left, y, words, colour=GREY))
            y += _TEXT_STEP
        return self._add_scale(left, y + 4)

    def _add_scale(self, x: int, y: int) -> int:
        for level in range(LEVELS + 1):
            colour = FREE_COLOUR if not level else _pale(BLACK, level)
            self._add_sample(x + _STEP_WIDTH * level, y, colour, _STEP_WIDTH)
        y += _TEXT_STEP
        right = x + _STEP_WIDTH * (LEVELS + 1)
        self.labels.append(Label(x, y, "all free", 12, "start", GREY))
        self.labels.append(Label(right, y, "little or none", 12, "end", GREY))
        return y

    def _add_sample(self, x: int, y: int, colour: str, width: int = 14) -> None:
        self._add(_FRAME, Box(x - 1, y - 8, width + 2, 16))
        self._add(colour, Box(x, y - 7, width, 14))


def _cell_height(rows: int) -> int:
    return max(min(_MAP_HEIGHT // max(rows, 1), _MOST_CELL_HEIGHT), _CELL_WIDTH)


def _address_step(height: int) -> int:
    """Return the number of rows from one address to the next."""
    step = 1
    while step * height < _ADDRESS_STEP:
        step *= 2
    return step


def _colour(code: int, level: int) -> str:
    return FREE_COLOUR if not level else _pale(LOOKS[code].colour, level)


def _pale(colour: str, level: int) -> str:
    part = _FREE_PART + (1 - _FREE_PART) * (level - 1) / (LEVELS - 1)
    return mix(colour, FREE_COLOUR, part)
