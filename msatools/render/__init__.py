# SPDX-License-Identifier: LGPL-2.1-or-later

"""Turn reports into blocks, and blocks into text."""

import os
from collections.abc import Iterable
from typing import TextIO

from msatools.render import plain
from msatools.render.blocks import Block


def show(blocks: Iterable[Block], out: TextIO) -> None:
    """Print blocks: styled on a terminal, else plain, and plain where NO_COLOR is set.

    :param out: looked at now, so that drgn's pipes and redirects are seen
    """
    if out.isatty() and not os.environ.get("NO_COLOR"):
        # rich takes long to import, and most output is not styled.
        from msatools.render import terminal

        terminal.show(blocks, out)
    else:
        plain.show(blocks, out)
