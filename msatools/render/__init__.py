# SPDX-License-Identifier: LGPL-2.1-or-later

"""Converts reports to blocks, and blocks to text."""

import os
from collections.abc import Iterable
from typing import TextIO

from msatools.render import plain
from msatools.render.blocks import Block


def show(blocks: Iterable[Block], out: TextIO) -> None:
    """Print blocks: styled on a terminal, plain elsewhere or if NO_COLOR is set.

    :param out: checked at each call, so that drgn's pipes and redirects are respected
    """
    if out.isatty() and not os.environ.get("NO_COLOR"):
        # rich is slow to import, and most output is not styled.
        from msatools.render import terminal

        terminal.show(blocks, out)
    else:
        plain.show(blocks, out)
