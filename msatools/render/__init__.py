# SPDX-License-Identifier: LGPL-2.1-or-later

"""Converts reports to blocks, and blocks to text."""

from collections.abc import Iterable
from typing import TextIO

from msatools.render.blocks import Block
from msatools.render.device import Device, device_of
from msatools.render.plain import texts


def show(blocks: Iterable[Block], out: TextIO, device: Device | None = None) -> None:
    """Print blocks, styled and fitted to the terminal if there is one.

    :param device: What *out* writes to, if the user's options say so.
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
