# SPDX-License-Identifier: LGPL-2.1-or-later

"""Targets: dumps, the running kernel and guests, opened with types and symbols."""

from msatools.target.describe import describe
from msatools.target.errors import TargetError
from msatools.target.model import Crash, Target
from msatools.target.open import Opened, TargetSpec, open_target

__all__ = [
    "Crash",
    "Opened",
    "Target",
    "TargetError",
    "TargetSpec",
    "describe",
    "open_target",
]
