# SPDX-License-Identifier: LGPL-2.1-or-later

"""
What each class of pages looks like on a map.

Blues are for users, greens for the page cache, warm colours for the kernel, greys for
what is nobody's. Hues and lightness are chosen so that the classes which take most of
a machine's memory are told apart by people with any kind of colour vision, and show on
dark ground and on light.
"""

from dataclasses import dataclass

from msatools.memory.classes import PageClass


@dataclass(frozen=True)
class Look:
    """How cells show a class."""

    letter: str
    """Where there are no colours; a lower-case one stands for the same class."""

    colour: str
    """``#rrggbb``"""


FREE_COLOUR = "#ecece8"

LOOKS: dict[int, Look] = {
    PageClass.FREE_BUDDY: Look(".", FREE_COLOUR),
    PageClass.FREE_PCP: Look(".", FREE_COLOUR),
    PageClass.FREE_HUGETLB: Look("Q", "#9977ff"),
    PageClass.FREE_UNACCEPTED: Look("_", "#c9c9d6"),
    PageClass.ANON: Look("A", "#0055cc"),
    PageClass.KSM: Look("K", "#3377aa"),
    PageClass.USER_HUGETLB: Look("H", "#7abfff"),
    PageClass.FILE: Look("F", "#00aa66"),
    PageClass.EXEC: Look("X", "#bbdd66"),
    PageClass.SHMEM: Look("S", "#55ddbb"),
    PageClass.BLOCKDEV: Look("B", "#226633"),
    PageClass.SLAB: Look("L", "#eeaa00"),
    PageClass.LARGE_KMALLOC: Look("M", "#c49a3a"),
    PageClass.PAGE_TABLES: Look("T", "#bb6699"),
    PageClass.PAGE_TABLES_OWN: Look("O", "#dd99bb"),
    PageClass.STACKS: Look("N", "#991188"),
    PageClass.VMALLOC: Look("V", "#cc6622"),
    PageClass.PERCPU: Look("P", "#994422"),
    PageClass.PIPES: Look("I", "#aa8866"),
    PageClass.SOCKETS: Look("E", "#886655"),
    PageClass.HUGE_ZERO: Look("G", "#88ccee"),
    PageClass.ZSMALLOC: Look("Z", "#f08a5d"),
    PageClass.MOVABLE: Look("J", "#ddaa77"),
    PageClass.RESERVED: Look("R", "#606060"),
    PageClass.OFFLINE: Look("W", "#a5a5a5"),
    PageClass.HWPOISON: Look("!", "#000000"),
    PageClass.DEVICE: Look("D", "#6699aa"),
    PageClass.MEMMAP: Look("Y", "#808070"),
    PageClass.UNATTRIBUTED: Look("U", "#7700ff"),
    PageClass.EXCLUDED: Look("?", "#bbbbbb"),
    PageClass.UNREADABLE: Look("%", "#8b0000"),
}


def mix(colour: str, ground: str, part: float) -> str:
    """
    Lay a colour over another.

    :param part: How much of it covers, 0 to 1.

    >>> mix("#000000", "#ffffff", 0.2)
    '#cccccc'
    """
    pairs = zip(_parts(colour), _parts(ground), strict=True)
    mixed = (round(part * over + (1 - part) * under) for over, under in pairs)
    return "#" + "".join(f"{each:02x}" for each in mixed)


def _parts(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))
