# SPDX-License-Identifier: LGPL-2.1-or-later

"""Maps of memory made by hand, as text and as pictures."""

import io
import itertools
import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from msatools.memory.classes import CLASSES, NCLASSES, PageClass
from msatools.memory.map import Cells, MapPlace, MemoryMap
from msatools.render import plain
from msatools.render.blocks import Chart, Mark
from msatools.render.device import show
from msatools.render.memstat import map
from msatools.render.memstat import picture as map_picture
from msatools.render.memstat.map import FREE_COLOUR, LOOKS, bands, shades
from msatools.render.memstat.picture import Box, Picture, png, svg
from tests.support.golden import Golden

PAGE = 4096
NODES = (MapPlace(0, "DMA32"), MapPlace(0, "Normal"), MapPlace(1, "Normal"))
Counts = Mapping[int, int]


def memory_of(
    numbers: Sequence[int],
    counts: Sequence[Counts],
    places: Sequence[int] | None = None,
    cell_pages: int = 16,
    section: int = 32,
) -> MemoryMap:
    """Make a map; pages in no class of ``counts`` are free."""
    rows = np.zeros((len(numbers), NCLASSES), np.int64)
    for row, its in zip(rows, counts, strict=True):
        for code, pages in its.items():
            row[code] = pages
        row[PageClass.FREE_BUDDY] += cell_pages - row.sum()
    node_rows = np.array(places or [0] * len(numbers), np.intp)
    cells = Cells(np.array(numbers), rows, node_rows, cell_pages, NODES)
    return MemoryMap(cell_pages, section, cells)


def chart(memory: MemoryMap) -> list[str]:
    charts = [b for b in map.map_blocks(memory, PAGE) if isinstance(b, Chart)]
    lines = itertools.chain.from_iterable(plain.lines(b) for b in charts)
    return ["".join(span.text for span in line).rstrip() for line in lines]


def test_what_a_cell_shows() -> None:
    memory = memory_of(
        range(6),
        [
            {},
            {PageClass.FREE_PCP: 3},
            {PageClass.SLAB: 1},
            {PageClass.SLAB: 3, PageClass.ANON: 4},
            {PageClass.ANON: 9},
            {PageClass.ANON: 5, PageClass.FILE: 11},
        ],
    )
    shown = shades(memory)
    assert shown.levels.tolist() == [0, 0, 1, 2, 3, 4]
    assert shown.codes.tolist()[2:] == [
        PageClass.SLAB,
        PageClass.ANON,
        PageClass.ANON,
        PageClass.FILE,
    ]


def test_golden_text(golden: Golden) -> None:
    anon, half = {PageClass.ANON: 16}, {PageClass.SLAB: 8}
    memories = {
        "two nodes": memory_of(
            [0, 1, 2, 63, 64, 65, 66, 200],
            [anon, {}, half, anon, half, {}, anon, {PageClass.RESERVED: 16}],
            [0, 0, 0, 0, 0, 1, 1, 2],
            section=16 * 8,
        ),
        "sections larger than a row": memory_of(range(256), [{}] * 256, section=2048),
        "four sections a cell": memory_of([0], [{}], section=4),
        "two cells a section": memory_of([0], [{}], section=32),
    }
    lines = []
    for title, memory in memories.items():
        lines += [f"--- {title}", *chart(memory), ""]
    golden("map", lines)


@pytest.mark.parametrize(("step", "label"), [(1, "Node 0"), (2, "")])
def test_zones_in_many_pieces_share_a_band(step: int, label: str) -> None:
    alternating = [step * (i % 2) for i in range(200)]
    (band,) = bands(memory_of(range(200), [{}] * 200, alternating), 64)
    assert band.label == label
    assert sum(len(row.cells) for row in band.rows) == 200


def test_no_memory() -> None:
    memory = memory_of([], [])
    assert bands(memory, 64) == ()
    assert list(map.map_blocks(memory, PAGE))
    assert svg(map_picture.picture(memory, PAGE, "6.1"))


def test_letters_and_colours_of_classes_differ() -> None:
    free = {PageClass.FREE_BUDDY, PageClass.FREE_PCP}
    assert LOOKS.keys() == CLASSES.keys()
    looks = [look for code, look in LOOKS.items() if code not in free]
    assert len({look.letter.lower() for look in looks}) == len(looks)
    assert len({look.colour for look in looks}) == len(looks)
    assert all(re.fullmatch("#[0-9a-f]{6}", look.colour) for look in looks)
    assert FREE_COLOUR not in {look.colour for look in looks}


# How colours look to people who lack one kind of cone: G. M. Machado, M. M. Oliveira
# and L. A. F. Fernandes, "A physiologically-based model for simulation of color vision
# deficiency" (2009), table 1, severity 1.0.
VISIONS = {
    "normal": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = np.array(
    [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
)
WHITE = np.array([0.9505, 1.0, 1.089])

MOST_OF_MEMORY = (
    PageClass.FREE_HUGETLB,
    PageClass.ANON,
    PageClass.USER_HUGETLB,
    PageClass.FILE,
    PageClass.EXEC,
    PageClass.SHMEM,
    PageClass.BLOCKDEV,
    PageClass.SLAB,
    PageClass.PAGE_TABLES,
    PageClass.STACKS,
    PageClass.VMALLOC,
    PageClass.UNATTRIBUTED,
    PageClass.RESERVED,
)


def lab(colour: str, vision: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Convert a colour to CIELAB (D65)."""
    srgb = np.array(list(bytes.fromhex(colour[1:]))) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(vision) @ linear, 0, 1)
    ratio = TO_XYZ @ seen / WHITE
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISIONS)
def test_colours_can_be_distinguished(vision: str) -> None:
    colours = {
        CLASSES[code]: lab(LOOKS[code].colour, VISIONS[vision])
        for code in MOST_OF_MEMORY
    }
    for (a, a_lab), (b, b_lab) in itertools.combinations(colours.items(), 2):
        # Side by side, a difference of 2.3 is just noticeable.
        assert np.linalg.norm(a_lab - b_lab) > 12, (a, b)


@pytest.mark.parametrize("ground", ["#000000", "#ffffff"])
def test_colours_show_on_dark_and_light(ground: str) -> None:
    for code in MOST_OF_MEMORY:
        there, here = (lab(c, VISIONS["normal"]) for c in (ground, LOOKS[code].colour))
        assert np.linalg.norm(there - here) > 25, CLASSES[code]


MARKS = Chart((("x ", Mark("AA", colour="#0055cc", signs="\u2588\u2588")),))


@pytest.fixture
def coloured(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    return monkeypatch


class FakeTerminal(io.TextIOWrapper):
    """A terminal of an encoding."""

    def __init__(self, encoding: str) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)

    def isatty(self) -> bool:
        return True


def printed(encoding: str = "utf-8") -> str:
    file = FakeTerminal(encoding)
    show([MARKS], file)
    file.seek(0)
    return file.read().strip()


@pytest.mark.usefixtures("coloured")
def test_colours_on_a_terminal() -> None:
    assert printed() == "x \x1b[38;2;0;85;204m\u2588\u2588\x1b[0m"
    assert printed("ascii") == "x \x1b[38;2;0;85;204mAA\x1b[0m"


@pytest.fixture
def drawn() -> Picture:
    anon = [{PageClass.ANON: 16}] * 256
    return map_picture.picture(memory_of(range(512), [*anon, *[{}] * 256]), PAGE, "6.1")


def area(boxes: Sequence[Box]) -> int:
    return sum(box.width * box.height for box in boxes)


def test_svg_and_png_show_the_same(drawn: Picture) -> None:
    root = ElementTree.fromstring(svg(drawn))
    width, height = int(root.attrib["width"]), int(root.attrib["height"])
    image = Image.open(io.BytesIO(png(drawn)))
    assert image.size == (2 * width, 2 * height)
    paths = {p.attrib["fill"]: p.attrib["d"] for p in root if p.tag.endswith("path")}
    assert paths.keys() == drawn.boxes.keys()
    colour = LOOKS[PageClass.ANON].colour
    match = re.match(r"M(\d+),(\d+)h1024v24h-1024z", paths[colour])
    assert match is not None
    x, y = 2 * int(match[1]), 2 * int(match[2])
    rgb = tuple(bytes.fromhex(colour[1:]))
    assert image.getpixel((x, y)) == image.getpixel((x + 2047, y + 47)) == rgb
    assert image.getpixel((x, y + 48)) == tuple(bytes.fromhex(FREE_COLOUR[1:]))


def test_hovering_says_what_a_colour_is(drawn: Picture) -> None:
    root = ElementTree.fromstring(svg(drawn))
    titles = {
        element.get("fill"): title.text
        for element in root
        for title in element
        if element.tag.endswith("path")
    }
    amount = "user.anon: 4,096 pages, 16.0 MiB"
    colour = LOOKS[PageClass.ANON].colour
    assert titles[colour] == f"{amount}; more than 3/4 of these cells are used"
    assert titles[FREE_COLOUR].startswith("free.buddy: ")
    # The picture has a title; a class has its own in the legend, too.
    assert root[0].tag.endswith("title")
    assert root[0].text == drawn.title
    assert drawn.title.startswith("Physical memory of ")
    assert amount in {title.text for element in root for title in element}


def picture_of(cells: Cells, cell_pages: int, release: str = "6.1") -> Picture:
    memory = MemoryMap(cell_pages, 8 * cell_pages, cells)
    return map_picture.picture(memory, PAGE, release)


def test_text_of_dumps_is_escaped() -> None:
    none = np.zeros(1, np.int64)
    counts = np.ones((1, NCLASSES), np.int64)
    cells = Cells(none, counts, none, NCLASSES, (MapPlace(0, "<b>\x07"),))
    picture = picture_of(cells, 32, "6.1<script>\x1b[31m&\u202e")
    root = ElementTree.fromstring(svg(picture))
    texts = "".join(element.text or "" for element in root)
    assert r"6.1<script>\x1b[31m&\u202e" in texts
    assert r"zone <b>\x07" in texts
    assert png(picture)


def test_size_of_files_is_bounded() -> None:
    """The worst case: no two cells of the largest map are alike."""
    count = 1 << 16
    rows = np.random.default_rng(1).integers(0, 100, (count, NCLASSES))
    places = np.zeros(count, np.intp)
    cells = Cells(np.arange(count), rows, places, 4096, (MapPlace(0, "Normal"),))
    assert len(svg(picture_of(cells, 4096))) < 1_600_000
