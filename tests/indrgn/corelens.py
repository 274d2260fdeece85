# SPDX-License-Identifier: LGPL-2.1-or-later

"""Modules of drgn-tools' corelens, with debug info and without.

drgn-tools is no dependency, and not published as a package: its source is named by
``MSATOOLS_DRGN_TOOLS`` or ``--drgn-tools``. It is installed once, into a directory of
the lab's cache that only the processes that run it see. The drgn that it declares to
want is older than ours, with which it runs all the same.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drgn import Architecture

from fixtures import lab
from fixtures.lab.cache import content_key, default_cache
from tests.indrgn import differences
from tests.indrgn.crash import Said
from tests.indrgn.pairs import Pair

SOURCE = "MSATOOLS_DRGN_TOOLS"
"""Environment variable: a directory with the source of drgn-tools."""

SAME = "same"
ROOT = Path(__file__).parents[2]
SECONDS = 3600.0

_CHILD = Path(__file__).with_name("corelens_child.py")
_KIND, _NAME = "peer", "drgn-tools"

_FRAME = re.compile(r"^(.)#[ \d]\d (\[\w+\]) (\S+) at (0x[0-9a-f]+).*$")
"""A frame as corelens prints it; of inlined ones all have the address of the last."""


class NoPeerError(Exception):
    """drgn-tools is not installed, and its source is not named."""


def environment(source: Path | None = None) -> Path:
    """Return the directory with drgn-tools, installed from its source if needed.

    :param source: Where that is, if the environment does not say it.
    :raises NoPeerError: if nobody says where, and it was never installed
    """
    cache = default_cache()
    named = source or (Path(os.environ[SOURCE]) if SOURCE in os.environ else None)
    if named is None:
        installed = sorted(
            (path for path in cache.root.glob(f"{_KIND}/{_NAME}-*") if path.is_dir()),
            key=lambda path: path.stat().st_mtime,
        )
        if not installed:
            raise NoPeerError(f"name the source of drgn-tools: {SOURCE}=DIRECTORY")
        return installed[-1]

    def fill(directory: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", directory, named], check=True)

    files = sorted((named / "drgn_tools").rglob("*.py"))
    return cache.entry(_KIND, _NAME, content_key([], files), fill)


def run(peer: Path, dump: Path, *vmlinux: Path) -> dict[str, Any]:
    """Return what the child found: by module of corelens, its runs."""
    done = subprocess.run(
        [sys.executable, _CHILD, dump, *vmlinux],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
        env=surroundings(peer),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def surroundings(peer: Path) -> dict[str, str]:
    """Return the environment of a process that sees drgn-tools, and msatools here."""
    return {**os.environ, "PYTHONPATH": f"{peer}{os.pathsep}{ROOT}"}


def compare(peer: Path, made: lab.Run, pair: Pair) -> Mapping[str, str]:
    """Return of each module :data:`SAME`, or what differs, or why it does not run."""
    of_dwarf = run(peer, made.kept, made.vmlinux)
    of_btf = run(peer, made.kept)
    return {name: _between(pair, name, of_dwarf[name], of_btf[name]) for name in of_btf}


def _between(pair: Pair, name: str, dwarf: Any, btf: Any) -> str:
    if btf["modules"]:
        return f"not tried: {', '.join(btf['modules'])} not loaded"
    found: dict[str, None] = {}
    for expected, seen in zip(dwarf["runs"], btf["runs"], strict=True):
        found.update(dict.fromkeys(_differences(pair, name, expected, seen)))
    return "; ".join(found) or SAME


def _differences(
    pair: Pair, name: str, dwarf: dict[str, str], btf: dict[str, str]
) -> list[str]:
    if dwarf["error"]:
        both = "with debug info, too" if btf["error"] else "with debug info only"
        return [f"fails {both}: {_short(dwarf['error'])}"]
    if btf["error"]:
        return [f"lacks: {_short(btf['error'])}"]
    if dwarf == btf:
        return []
    if "could not find debuginfo for" in dwarf["out"]:
        return ["runs; with debug info it wants that of modules, too"]
    if name == "lsmod" and _untyped(btf["out"]) == _untyped(dwarf["out"]):
        return [differences.MODULES]
    if name == "bt" and pair.btf.platform.arch == Architecture.AARCH64:
        return differences.between_records(name, dwarf["out"], btf["out"])
    if name == "bt":
        names = _between_stacks(dwarf["out"], btf["out"])
        if names:
            return names
    # The kind of a symbol is that of a section, where kallsyms says it.
    said = (
        Said(re.sub(r"\[(function|object) ", "[", each["out"]), "")
        for each in (dwarf, btf)
    )
    try:
        return differences.between(pair, name, *said)
    except AssertionError as error:
        print(f"corelens {error}", file=sys.stderr)
        return ["**differs**"]


def _untyped(text: str) -> list[str]:
    """Leave out types of parameters that corelens takes from the name of a function."""
    return re.sub(r"<\w+\?>|\bUNKNOWN\b", "?", text).split()


def _physical(text: str) -> list[str]:
    """Leave out inlined frames, source lines and the numbers of frames."""
    lines: list[str] = []
    above = ""
    for line in text.splitlines():
        frame = _FRAME.match(line)
        pc = frame[4] if frame else ""
        if frame and pc == above:
            lines.pop()
        above = pc
        lines.append(f"{frame[2]} {pc} {frame[3]}" if frame else line)
    return lines


def _between_stacks(dwarf: str, btf: str) -> list[str]:
    """Return what stacks lack; empty if that has no name."""
    names = [differences.INLINED, differences.LINES]
    both = _physical(dwarf), _physical(btf)
    for name, leave_out in (
        (differences.LABELS, _unlabelled),
        (differences.CLONES, _uncloned),
        (differences.NAMES, _unaliased),
        (differences.PANIC, _without_panic),
    ):
        if both[0] == both[1]:
            break
        left = leave_out(both[0]), leave_out(both[1])
        names += [name] if left != both else []
        both = left
    return names if both[0] == both[1] else []


def _uncloned(frames: list[str]) -> list[str]:
    return [re.sub(r"\.(?:constprop|isra|part)\b\S*$", "", each) for each in frames]


def _unaliased(frames: list[str]) -> list[str]:
    """Give all names of a system call without arguments its one function.

    They are aliases: arch/x86/include/asm/syscall_wrapper.h, SYSCALL_DEFINE0().
    """
    return [re.sub(r" __(?:do|x64|ia32)_sys_", " sys_", each) for each in frames]


def _without_panic(frames: list[str]) -> list[str]:
    return [frame for frame in frames if not frame.endswith(" panic")]


def _unlabelled(frames: list[str]) -> list[str]:
    """Leave out the names of labels, and what DWARF has above a thread's first.

    That is a frame at 0, or in user mode the same one again.
    """
    kept: list[str] = []
    for frame in frames:
        left = re.sub(r" (?:entry_|secondary_|common_)\w+$", "", frame)
        is_extra = left == "[0] 0x0 0x0" or "continuing to previous stack" in left
        if not is_extra and (not left or [left] != kept[-1:]):
            kept.append(left)
    return kept


def _short(error: str) -> str:
    return error.partition(": load the kernel's")[0].replace("|", "\\|")
