# SPDX-License-Identifier: LGPL-2.1-or-later

"""What debug info has and BTF has not, as it shows in the output of drgn's commands."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from drgn import Architecture, Program

from tests.indrgn.crash import Said
from tests.indrgn.pairs import Pair

INLINED = "inlined frames"
LINES = "source lines"
LOCALS = "local variables"
FILE = "the path of vmlinux"
LABELS = "names of frames in assembly: labels, not functions"
CLONES = "names of clones have their suffix, as .constprop.0"
PANIC = "panic() above __crash_kexec()"
MODULES = "more: symbols of modules, which debug info of the kernel alone has not"
MAPPINGS = (
    "more: [vvar] and [vdso], as debug info of arm64 has functions 8 bytes behind "
    "their symbols"
)
SIZES = "symbols of 64 KiB and more, whose end kallsyms does not say"
NAMES = "which of several symbols at an address"
LENGTH = "[0] or []"
RECORDS = (
    "frame records (arm64) have no stack pointers, nor the caller of a leaf function"
)
ARRAY = "an array's length, which configuration decides"
SYMBOLS = "symbols that kallsyms leaves out, the order of others"

_FRAME = re.compile(r"^ *#\d+ ")
_SYMBOL = re.compile(
    r"\b(?!0x)([A-Za-z_][\w.]*)(?:\+(0x[0-9a-f]+|\d+))?(?:/0x[0-9a-f]+)?"
)


@dataclass(frozen=True)
class Difference:
    """A kind of difference, and how to leave it out of an output."""

    name: str
    leave_out: Callable[[Program, str], str]

    command: str = ""
    """The command that shows it, if only one does."""


def _inlined(prog: Program, text: str) -> str:
    """Leave out inlined frames with what is shown of them; count the others."""
    lines, number, is_inline = [], 0, False
    for line in text.splitlines():
        if _FRAME.match(line):
            is_inline = "(inline)" in line
            if not is_inline:
                lines.append(_FRAME.sub(f"#{number} ", line))
                number += 1
        elif not line.startswith(" "):
            number, is_inline = 0, False
            lines.append(line)
        elif not is_inline:
            lines.append(line)
    return "\n".join(lines)


def _lines(prog: Program, text: str) -> str:
    kept = []
    for line in text.splitlines():
        if re.fullmatch(r" +[\w./-]+\.[chS]: \d+", line):
            continue
        line = re.sub(r" [\w./-]+\.[chS]: \d+$", "", line)
        kept.append(re.sub(r" \([\w./-]+\.[chS]:\d+:\d+\)$", "", line))
    return "\n".join(kept)


def _locals(prog: Program, text: str) -> str:
    return "\n".join(
        line
        for line in text.splitlines()
        if line.startswith((" #", "#", "PID")) or not line
    )


def _panic(prog: Program, text: str) -> str:
    """Leave out a caller that ORC passes over; test_stacks.py says why."""
    text = re.sub(r"\n *#\d+ \[\w+\] panic at .*", "", text)
    return _inlined(prog, text)


def _labels(prog: Program, text: str) -> str:
    """Leave out the names of frames of which DWARF describes no function."""
    name = r"(?:entry_|secondary_|common_)"
    return re.sub(rf"(?<=\] ){name}\S+(?= at )|\b{name}\w+\+\d+", "", text)


def _file(prog: Program, text: str) -> str:
    return re.sub(r"^ *KERNEL: .*\n", "", text, flags=re.M)


def _replaced(text: str, address: Callable[[re.Match[str]], str]) -> str:
    """Replace what may be symbols; each is looked up once, as many are no symbol."""
    known: dict[str, str] = {}

    def once(match: re.Match[str]) -> str:
        if match[0] not in known:
            known[match[0]] = address(match)
        return known[match[0]]

    return _SYMBOL.sub(once, text)


def _names(prog: Program, text: str) -> str:
    """Put addresses in the place of symbols."""

    def address(match: re.Match[str]) -> str:
        name, offset = match[1], int(match[2] or "0", 0)
        try:
            symbols = prog.symbols(name)
        except LookupError:
            return match[0]
        if len({symbol.address for symbol in symbols}) != 1:
            return match[0]
        return f"{symbols[0].address + offset:x}"

    return _replaced(text, address)


def _modules(prog: Program, text: str) -> str:
    """Put addresses in the place of modules' symbols."""
    (kernel,) = prog.main_module().address_ranges or ((0, 0),)

    def address(match: re.Match[str]) -> str:
        try:
            place: int = prog.symbol(match[1]).address + int(match[2] or "0", 0)
        except LookupError:
            return match[0]
        return match[0] if kernel[0] <= place < kernel[1] else f"{place:x}"

    return _replaced(text, address)


def _sizes(prog: Program, text: str) -> str:
    """Put addresses in the place of large symbols; drgn takes 64 KiB for a gap."""

    def address(match: re.Match[str]) -> str:
        try:
            symbol = prog.symbol(match[1])
        except LookupError:
            return match[0]
        is_large = symbol.size >= 1 << 16
        return f"{symbol.address + int(match[2] or '0', 0):x}" if is_large else match[0]

    return _replaced(text, address)


def _mappings(prog: Program, text: str) -> str:
    """Leave out names of special mappings, which drgn knows by a function's address."""
    return re.sub(r"\[(?:vvar|vdso)\S*\]", "", text)


def _length(prog: Program, text: str) -> str:
    return text.replace(" [0])", " [])")


DIFFERENCES = (
    Difference(INLINED, _inlined, "bt"),
    Difference(PANIC, _panic, "bt"),
    Difference(LABELS, _labels, "bt"),
    Difference(LOCALS, _locals, "bt -V"),
    Difference(LINES, _lines),
    Difference(FILE, _file, "sys"),
    Difference(MAPPINGS, _mappings, "vm"),
    Difference(MODULES, _modules),
    Difference(SIZES, _sizes),
    Difference(NAMES, _names),
    Difference(LENGTH, _length),
)


def between(pair: Pair, line: str, dwarf: Said, btf: Said) -> list[str]:
    """Return what a command lacks without debug info; nothing if it says the same.

    :raises AssertionError: if there is any other difference
    """
    if dwarf == btf:
        return []
    if not dwarf.error and re.search(r"\[\]' (is not iter|has no len)", btf.error):
        return [ARRAY]
    assert dwarf.error == btf.error, f"{line}: {dwarf.error!r}, {btf.error!r}"
    if line == "sym -l":
        lost = {*dwarf.out.splitlines()} - {*btf.out.splitlines()}
        assert len(lost) < len(btf.out.splitlines()) / 100
        return [SYMBOLS]
    is_arm64 = pair.btf.platform.arch == Architecture.AARCH64
    if is_arm64 and re.search(r"\bbt\b", line) and "help" not in line:
        return between_records(line, dwarf.out, btf.out)
    if line.startswith("bt -d"):
        return _between_stacks(dwarf.out, btf.out)
    expected, found, names = dwarf.out, btf.out, []
    for each in DIFFERENCES:
        if each.command not in line:
            continue
        left = each.leave_out(pair.dwarf, expected), each.leave_out(pair.btf, found)
        if _apart(*left) >= _apart(expected, found):
            continue
        names.append(each.name)
        expected, found = left
        if expected.split() == found.split():
            return names
    raise AssertionError(f"{line}:\n{_first(expected, found)}")


def between_records(line: str, dwarf: str, btf: str) -> list[str]:
    """Compare what frame records have of most frames: return addresses.

    In drgn's style frames have names alone; clones of functions have a suffix.
    """
    if line.startswith("bt -d"):
        expected, found = (
            [name.partition(".")[0] for name in re.findall(r"#\d+ (\S+)", text)]
            for text in (dwarf, btf)
        )
    else:
        expected, found = (
            re.findall(r"# ?\d+ .* at (?:0x)?([0-9a-f]{16})\b", text)
            for text in (dwarf, btf)
        )
    assert len(found) > 2
    rest = iter(expected)
    assert all(each in rest for each in found), (line, expected, found)
    return [INLINED, LINES, RECORDS]


def _between_stacks(dwarf: str, btf: str) -> list[str]:
    """Compare stacks in drgn's style, which does not mark the inlined frames.

    The last frame in the kernel is in assembly, where symbols stand within functions.
    """
    expected, found = (
        re.findall(r"^ *#\d+ (\S+)", text, re.M)[:-1] for text in (dwarf, btf)
    )
    assert len(found) > 2
    rest = iter(expected)
    assert all(name in rest for name in found), (expected, found)
    return [INLINED, LINES]


def _apart(expected: str, found: str) -> int:
    """Return how many lines of two outputs have no equal in the other."""
    first = Counter(" ".join(line.split()) for line in expected.splitlines())
    second = Counter(" ".join(line.split()) for line in found.splitlines())
    return ((first - second) + (second - first)).total()


def _first(expected: str, found: str) -> str:
    for old, new in zip(expected.splitlines(), found.splitlines(), strict=False):
        if old != new:
            return f"- {old[:300]}\n+ {new[:300]}"
    return f"{len(expected)} characters, {len(found)}"
