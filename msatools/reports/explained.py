# SPDX-License-Identifier: LGPL-2.1-or-later

"""The document of ``--why --json``: what names in an output mean."""

from typing import ClassVar

from msgspec import Struct


class Explained(Struct, frozen=True):
    """What one name means."""

    name: str
    """The name, as it is printed."""

    kind: str
    """What it is the name of, such as ``column``."""

    meaning: str
    """What it means, in a few words."""

    source: str
    """Where it comes from; empty if there is no more to say."""

    bound: str
    """Accuracy: ``exact``, ``estimate``, ``upper``, ``lower`` or ``not kept``."""


class Explanations(Struct, frozen=True):
    """What the names mean that were asked for."""

    schema: ClassVar[str] = "msatools.why/1"

    command: str
    """The command, without ``msa-``."""

    why: tuple[Explained, ...]
    """An entry for each name, and for each kind of a name with several."""
