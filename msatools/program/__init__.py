# SPDX-License-Identifier: LGPL-2.1-or-later

"""Targets: dumps, the running kernel and guests, opened with types and symbols."""

from msatools.program.description import describe
from msatools.program.model import Crash, Target, TargetError
from msatools.program.open import Opened, TargetSpec, open_target

__all__ = (
    "Crash",
    "Opened",
    "Target",
    "TargetError",
    "TargetSpec",
    "describe",
    "open_target",
)
