# SPDX-License-Identifier: LGPL-2.1-or-later

"""The output device, its size and colours; prints blocks on it."""

import os
from collections.abc import Iterable
from typing import Literal, TextIO, cast

from msgspec import Struct

from msatools.render.blocks import Block
from msatools.render.plain import texts

Colour = Literal["auto", "always", "never"]
"""Values of ``--color``."""


Colours = Literal["standard", "256", "truecolor"]
"""The colours of a device, by rich's names: the 16 of ANSI, the 256 of xterm, or any
``#rrggbb``."""


class Device(Struct, frozen=True):
    """An output device; by default a file, without size and colours."""

    width: int | None = None
    """Columns of the terminal; ``None`` for no limit."""

    height: int | None = None
    """Lines of the terminal; ``None`` for no limit."""

    colours: Colours | None = None
    has_signs: bool = False
    """Whether the device can print all of Unicode, not only ASCII."""

    full: bool = False
    """Whether to show all columns, and lines outside tables in full (-v)."""

    @property
    def is_plain(self) -> bool:
        """Whether text is printed without colours, and not fitted to a width."""
        return self.width is None and self.colours is None


_DEFAULT_SIZE = os.terminal_size((80, 24))


def terminal_size(out: TextIO) -> os.terminal_size:
    """Return the current size of a terminal; 80x24 if unknown.

    ``COLUMNS`` and ``LINES``, which do not follow a resize, are only used for a pipe to
    a terminal, such as that of ``--sandbox``.
    """
    try:
        current = os.get_terminal_size(out.fileno())
    except (OSError, ValueError):
        columns, lines = _DEFAULT_SIZE
        wanted = _wanted("COLUMNS") or columns, _wanted("LINES") or lines
        return os.terminal_size(wanted)
    return current if all(current) else _DEFAULT_SIZE


def device_of(out: TextIO, colour: Colour = "auto", *, full: bool = False) -> Device:
    """
    Return the device that a stream writes to.

    A pipe or file has no size, but ``COLUMNS`` may set a width for coloured output.

    :param full: See :attr:`Device.full`.
    """
    has_signs = (getattr(out, "encoding", None) or "").lower().startswith("utf")
    is_coloured = colour == "always"
    width: int | None
    height: int | None
    if out.isatty():
        is_coloured |= colour == "auto" and _wants_colours()
        width, height = terminal_size(out)
    else:
        width, height = _wanted("COLUMNS") if is_coloured else None, None
    colours = _colours(out) if is_coloured else None
    return Device(width, height, colours, has_signs, full)


def _wants_colours() -> bool:
    """Return whether the environment allows colours: https://no-color.org."""
    is_dumb = os.environ.get("TERM", "dumb").lower() in ("dumb", "unknown")
    return not is_dumb and not os.environ.get("NO_COLOR")


def _colours(out: TextIO) -> Colours:
    """Return the colours of the terminal that a stream writes to."""
    if os.environ.get("TERM", "").endswith("-direct"):
        return "truecolor"
    # rich takes 20 ms to import, which output without colours need not pay.
    from rich.console import Console

    found = Console(file=out, force_terminal=True).color_system
    return "standard" if found in (None, "windows") else cast(Colours, found)


def _wanted(name: str) -> int | None:
    """Return a positive number from the environment; ``None`` if there is none."""
    word = os.environ.get(name, "")
    return int(word) if word.isdecimal() and int(word) else None


def show(blocks: Iterable[Block], out: TextIO, device: Device | None = None) -> None:
    """Print blocks, styled and fitted to the terminal if there is one.

    :param device: The device of *out*; ``None`` to detect it.
    """
    device = device_of(out) if device is None else device
    if device.is_plain:
        for block in blocks:
            for text in texts(block):
                out.write(text.rstrip() + "\n")
        return
    # rich takes 20 ms to import.
    from msatools.render.terminal import drawn

    for text in drawn(blocks, device):
        out.write(text + "\n")
