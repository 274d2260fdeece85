# SPDX-License-Identifier: LGPL-2.1-or-later

"""Maps of memory as files."""

from importlib.util import find_spec
from pathlib import PurePath
from typing import TYPE_CHECKING

from msatools.cli.atomic_write import check_writable, replace_file
from msatools.cli.output import OutputError

if TYPE_CHECKING:
    # It needs numpy, which takes long to import.
    from msatools.memory.map.model import MemoryMap


def check_map_file(path: str) -> None:
    """See that a map can be written, before memory is scanned for it.

    :raises OutputError: if it cannot be
    """
    check_writable(path)
    if _is_png(path) and find_spec("PIL") is None:
        raise OutputError(
            f"{path}: Pillow is missing, which draws PNG files; install "
            "msatools[pictures], or name a .svg file"
        )


def write_map(path: str, memory: "MemoryMap", page_size: int, release: str) -> None:
    """Write a map to a file: PNG if its name says so, else SVG.

    :raises OutputError: if it cannot be written
    """
    from msatools.render.memstat.map_picture import picture

    drawn = picture(memory, page_size, release)
    if _is_png(path):
        from msatools.render.memstat.png import png

        replace_file(path, png(drawn))
    else:
        from msatools.render.memstat.svg import svg

        replace_file(path, svg(drawn))


def _is_png(path: str) -> bool:
    return PurePath(path).suffix.lower() == ".png"
