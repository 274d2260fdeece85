# SPDX-License-Identifier: LGPL-2.1-or-later

"""``--map`` and ``--frag`` on the command line."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from drgn import Program
from msatools.commands.memstat import COMMAND
from PIL import Image

from fixtures.demo import DEMOS
from msatools.cli.arguments import make_parser
from msatools.cli.main import run_console
from tests.support.prompt import printed


@pytest.mark.parametrize(
    ("words", "file", "rest"),
    [
        ("--map vmcore", "-", ["vmcore"]),
        ("--map 5 3", "-", ["5", "3"]),
        ("vmcore --map", "-", ["vmcore"]),
        ("--map map.svg vmcore", "map.svg", ["vmcore"]),
        ("vmcore --map MAP.PNG 5", "MAP.PNG", ["vmcore", "5"]),
        ("--map=map.svg vmcore", "map.svg", ["vmcore"]),
        ("--map -- map.svg", "-", ["map.svg"]),
        ("vmcore", None, ["vmcore"]),
    ],
)
def test_words(words: str, file: str | None, rest: list[str]) -> None:
    args = make_parser(COMMAND, in_drgn=False).parse_intermixed_args(words.split())
    assert (args.map, args.words) == (file, rest)


NO_PICTURES = (
    *("--map=map.jpg", "--map map.jpg", "--map map.JPG vmcore", "vmcore --map map.jpg"),
    *("--map map.pdf 5", "-k --map map.jpg 5"),
    "--json --map map.jpg --frag vmcore",
    # Not a picture's suffix, but the target is named separately.
    *("--map map vmcore", "vmcore --map map", "-c vmcore --map map", "-k --map map"),
    "--qemu guest.sock --map map 5",
)


@pytest.mark.parametrize("words", NO_PICTURES)
def test_file_of_another_kind(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_console(COMMAND, words.split()) == 2
    (word,) = (word for word in words.split() if "map" in word and word != "--map")
    assert capsys.readouterr() == (
        "",
        "msa-memstat: --map: not a file that ends in .svg or .png: "
        f"{word.removeprefix('--map=')}; see msa-memstat --help\n",
    )


def test_files(prog: Program, tmp_path: Path) -> None:
    svg, png = tmp_path / "map.svg", tmp_path / "map.png"
    text = printed(prog, "memstat", "--map", svg)
    assert text.splitlines()[-1] == f"map written to {svg}"
    text = printed(prog, "memstat", "--map", "--frag")
    for words in (
        "Physical memory, 1.0 MiB a cell",
        "Node 1, zone Normal",
        "(no memory: 3.00 GiB)",
        "Free blocks by order",
        "Page blocks of 2.0 MiB by migrate type",
        "Blocks that would be free but for so many pages",
    ):
        assert words in text
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    png.write_bytes(b"old")
    assert json.loads(printed(prog, "memstat", "--map", png, "--json"))["map"]["runs"]
    assert Image.open(png).format == "PNG"
    assert {path.name for path in tmp_path.iterdir()} == {"map.svg", "map.png"}


def test_file_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "d.svg"
    folder.mkdir()
    assert run_console(COMMAND, ["--map", str(folder), str(DEMOS["6.12"].core)]) == 1
    error = f"msa-memstat: {folder}: a directory; name a file\n"
    assert capsys.readouterr() == ("", error)
