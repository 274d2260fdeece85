# SPDX-License-Identifier: LGPL-2.1-or-later

"""``--map`` and ``--frag`` as users ask for them."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from drgn import Program
from drgn.commands import CommandError, run_command
from msatools.commands.memstat import COMMAND
from PIL import Image

from fixtures import lab
from msatools.cli import UsageError, make_parser, run_console
from msatools.target import TargetSpec, open_target
from tests.conftest import Msa


@pytest.fixture(scope="module")
def prog_612(run_612: lab.Run) -> Program:
    spec = TargetSpec(path=str(run_612.elf), vmlinux=str(run_612.vmlinux))
    return open_target(spec).prog


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


@pytest.mark.parametrize(
    "words",
    [
        "--map=map.jpg",
        "--map map.jpg",
        "--map map.JPG vmcore",
        "vmcore --map map.jpg",
        "--map map.pdf 5",
        "-k --map map.jpg 5",
        "--json --map map.jpg --frag vmcore",
        # No picture's ending, but the target is another.
        "--map map vmcore",
        "vmcore --map map",
        "-c vmcore --map map",
        "--qemu guest.sock --map map 5",
        "-k --map map",
    ],
)
def test_file_of_another_kind(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_console(COMMAND, words.split()) == 2
    (word,) = (word for word in words.split() if "map" in word and word != "--map")
    assert capsys.readouterr() == (
        "",
        "msa-memstat: --map: not a file that ends in .svg or .png: "
        f"{word.removeprefix('--map=')}; see msa-memstat --help\n",
    )


@pytest.mark.parametrize("word", ["map.jpg", "map", "vmcore"])
def test_file_of_another_kind_inside_drgn(word: str) -> None:
    """A target can be no word there."""
    parser = make_parser(COMMAND, in_drgn=True)
    with pytest.raises(UsageError, match=rf"ends in \.svg or \.png: {word}$"):
        parser.parse_intermixed_args(["--map", word])


@pytest.mark.parametrize(
    "words", ["--map none/vmcore", "none/vmcore --map", "--map -c none/vmcore"]
)
def test_target_that_follows(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is a target, not the name of a picture."""
    assert run_console(COMMAND, words.split()) == 1
    assert capsys.readouterr().err.startswith("msa-memstat: none/vmcore: no such file")


def test_files(msa: Msa, run_612: lab.Run, tmp_path: Path) -> None:
    dump = str(run_612.elf)
    svg, png = tmp_path / "map.svg", tmp_path / "map.png"
    done = msa("--map", svg, dump)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"map written to {svg}"
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    png.write_bytes(b"old")
    done = msa(dump, "--map", png, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["map"]["runs"]
    assert Image.open(png).format == "PNG"
    assert {path.name for path in tmp_path.iterdir()} == {"map.svg", "map.png"}


def test_text(msa: Msa, run_612: lab.Run) -> None:
    done = msa("--map", "--frag", str(run_612.elf))
    assert done.returncode == 0, done.stderr
    for words in (
        "Physical memory, 1.0 MiB a cell",
        "Node 1, zone Normal",
        "(no memory: 3.00 GiB)",
        "Free blocks by order",
        "Page blocks of 2.0 MiB by migrate type",
        "Blocks that would be free but for so many pages",
    ):
        assert words in done.stdout


def test_file_that_cannot_be_written_is_one_line(
    msa: Msa, run_612: lab.Run, tmp_path: Path
) -> None:
    folder = tmp_path / "d.svg"
    folder.mkdir()
    done = msa("--map", folder, str(run_612.elf))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"msa-memstat: {folder}: a directory; name a file\n"


def test_inside_drgn(
    prog_612: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "map.svg"
    report = run_command(prog_612, f"memstat --frag --map {path}")
    assert path.exists()
    assert report.frag is not None
    assert len(report.map.cells) == report.pages // report.map.cell_pages
    assert f"map written to {path}" in capsys.readouterr().out
    with pytest.raises(CommandError, match=r"%memstat: .*: no such directory"):
        run_command(prog_612, f"memstat --map {tmp_path}/none/map.svg")
