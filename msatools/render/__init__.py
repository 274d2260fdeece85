# SPDX-License-Identifier: LGPL-2.1-or-later

"""Converts reports to blocks, and blocks to text.

One folder a command converts its report to blocks (:mod:`.blocks`);
:func:`msatools.render.device.show` prints them, plainly or as on a terminal.
"""
