# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Styles of the classes of pages on a map.

Blue is for users, green for the page cache, warm colours for the kernel, grey for pages
without a user. Hues and lightness are chosen so that the largest classes are distinct
with any kind of colour vision, and visible on dark and light backgrounds: the tests
measure their distances in CIELAB, as they are and as seen with protanopia, deuteranopia
and tritanopia (Machado, Oliveira and Fernandes, 2009). Palettes that are made for this,
such as those of Okabe and Ito or of Paul Tol, have too few colours for all classes.
"""

from msgspec import Struct

from msatools.memory.pages.classes import PageClass


class Style(Struct, frozen=True):
    """Style of the cells of a class."""

    letter: str
    """Letter without colours; lower case for a pale cell of the same class."""

    colour: str
    """``#rrggbb``."""


FREE_COLOUR = "#ecece8"

LOOKS: dict[int, Style] = {
    PageClass.FREE_BUDDY: Style(".", FREE_COLOUR),
    PageClass.FREE_PCP: Style(".", FREE_COLOUR),
    PageClass.FREE_HUGETLB: Style("Q", "#9977ff"),
    PageClass.FREE_UNACCEPTED: Style("_", "#c9c9d6"),
    PageClass.ANON: Style("A", "#0055cc"),
    PageClass.KSM: Style("K", "#3377aa"),
    PageClass.USER_HUGETLB: Style("H", "#7abfff"),
    PageClass.FILE: Style("F", "#00aa66"),
    PageClass.EXEC: Style("X", "#bbdd66"),
    PageClass.SHMEM: Style("S", "#55ddbb"),
    PageClass.BLOCKDEV: Style("B", "#226633"),
    PageClass.SLAB: Style("L", "#eeaa00"),
    PageClass.LARGE_KMALLOC: Style("M", "#c49a3a"),
    PageClass.PAGE_TABLES: Style("T", "#bb6699"),
    PageClass.PAGE_TABLES_OWN: Style("O", "#dd99bb"),
    PageClass.STACKS: Style("N", "#991188"),
    PageClass.VMALLOC: Style("V", "#cc6622"),
    PageClass.VMAP: Style("C", "#dd7744"),
    PageClass.PERCPU: Style("P", "#994422"),
    PageClass.PIPES: Style("I", "#aa8866"),
    PageClass.SOCKETS: Style("E", "#886655"),
    PageClass.RINGS: Style("&", "#77aa55"),
    PageClass.REQUESTS: Style("#", "#b8a055"),
    PageClass.MEMPOOLS: Style("@", "#a08855"),
    PageClass.DMA: Style("+", "#998844"),
    PageClass.DMABUF: Style("$", "#669977"),
    PageClass.TRACING: Style("=", "#887799"),
    PageClass.GLOBALS: Style("^", "#8a8a60"),
    PageClass.HUGE_ZERO: Style("G", "#88ccee"),
    PageClass.ZSMALLOC: Style("Z", "#f08a5d"),
    PageClass.MOVABLE: Style("J", "#ddaa77"),
    PageClass.RESERVED: Style("R", "#606060"),
    PageClass.OFFLINE: Style("W", "#a5a5a5"),
    PageClass.HWPOISON: Style("!", "#000000"),
    PageClass.DEVICE: Style("D", "#6699aa"),
    PageClass.MEMMAP: Style("Y", "#808070"),
    PageClass.UNATTRIBUTED: Style("U", "#7700ff"),
    PageClass.EXCLUDED: Style("?", "#bbbbbb"),
    PageClass.UNREADABLE: Style("%", "#8b0000"),
}


def mix(colour: str, ground: str, part: float) -> str:
    """
    Return the mix of a colour and its background.

    :param part: Opacity of the colour, 0 to 1.

    >>> mix("#000000", "#ffffff", 0.2)
    '#cccccc'
    """
    pairs = zip(_parts(colour), _parts(ground), strict=True)
    mixed = (round(part * over + (1 - part) * under) for over, under in pairs)
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _parts(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))
