# SPDX-License-Identifier: LGPL-2.1-or-later

"""Styles lines with the codes of terminals (ECMA-48, "Select Graphic Rendition")."""

from collections.abc import Iterable, Iterator
from functools import lru_cache

from msatools.render.blocks import Mark, Span, Style
from msatools.render.device import Colours, Device
from msatools.render.plain import Line

_CODES: dict[Style | None, str] = {
    None: "",
    "title": "1",
    "good": "32",
    "warn": "33",
    "bad": "1;31",
    "dim": "2",
}


def styled(lines: Iterable[Line], device: Device) -> Iterator[str]:
    """Yield lines with the codes for their styles, if the device has colours."""
    if not device.colours:
        for line in lines:
            yield "".join(span.text for span in line).rstrip()
        return
    for line in lines:
        yield "".join(_coded(*_piece(span, device)) for span in _trimmed(line))


def _trimmed(line: Line) -> Line:
    """Return a line without blanks at its end."""
    for end in range(len(line), 0, -1):
        last = line[end - 1]
        if isinstance(last, Mark):
            return line[:end]
        if text := last.text.rstrip():
            return (*line[: end - 1], Span(text, last.style))
    return ()


def _piece(span: Span, device: Device) -> tuple[str, str]:
    """Return the text of a span, and its codes."""
    if not isinstance(span, Mark) or device.colours < Colours.INDEXED:
        # With few colours, letters say more than signs.
        return span.text, _CODES[span.style]
    text = span.signs if device.has_signs else span.text
    if span.colour is None:
        return text, _CODES[span.style]
    return text, _foreground(span.colour, device.colours)


def _coded(text: str, codes: str) -> str:
    return f"\x1b[{codes}m{text}\x1b[0m" if codes and text else text


@lru_cache(maxsize=1024)
def _foreground(colour: str, colours: Colours) -> str:
    parts = bytes.fromhex(colour[1:])
    if colours == Colours.ALL:
        return "38;2;" + ";".join(map(str, parts))
    return f"38;5;{_nearest(parts)}"


_LEVELS = (0, 95, 135, 175, 215, 255)
"""Levels of each channel of xterm's colours 16 to 231; 232 to 255 are greys."""


def _nearest(parts: bytes) -> int:
    """Return the nearest of xterm's 256 colours."""
    steps = [_closest(part, _LEVELS) for part in parts]
    red, green, blue = steps
    grey = min(max(round((sum(parts) / 3 - 8) / 10), 0), 23)
    in_cube = _distance(parts, [_LEVELS[step] for step in steps])
    if _distance(parts, [8 + 10 * grey] * 3) < in_cube:
        return 232 + grey
    return 16 + 36 * red + 6 * green + blue


def _closest(part: int, levels: tuple[int, ...]) -> int:
    return min(range(len(levels)), key=lambda step: abs(levels[step] - part))


def _distance(parts: bytes, others: list[int]) -> int:
    return sum((part - other) ** 2 for part, other in zip(parts, others, strict=True))
