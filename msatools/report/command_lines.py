# SPDX-License-Identifier: LGPL-2.1-or-later

"""Command lines to type, for the target that a report is of."""

import shlex
from collections.abc import Iterable

from msatools.target.model import Target


def command_line(target: Target, name: str, arguments: Iterable[str] = ()) -> str:
    """Return the command line of ``msa-NAME`` on a target, quoted for a shell.

    :param arguments: What follows the target.
    """
    words = [f"msa-{name}", *_target_words(target), *arguments]
    return " ".join(shlex.quote(word) for word in words)


def _target_words(target: Target) -> list[str]:
    if target.kind == "kcore":
        return []
    if target.kind == "qmp":
        return ["--qemu", target.path]
    # A number would be an interval.
    is_number = target.path.replace(".", "", 1).isdecimal()
    words = [f"./{target.path}" if is_number else target.path]
    vmlinux = next((s.path for s in target.sources if s.module == "kernel"), None)
    return [*words, *target.options, *(["-s", vmlinux] if vmlinux else [])]
