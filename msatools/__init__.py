# SPDX-License-Identifier: LGPL-2.1-or-later

"""Crash-dump and live-kernel analysis for Linux, on drgn."""

__version__ = "0.1.0.dev0"
