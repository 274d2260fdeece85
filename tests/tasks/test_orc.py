# SPDX-License-Identifier: LGPL-2.1-or-later

"""ORC entries of each kernel version are decoded."""

import pytest
from drgn import Architecture, Object, Platform, Program, Type, TypeMember
from msgspec.structs import replace

from msatools.errors import MissingError
from msatools.tasks.text import BY_FRAME_POINTER, Base, OrcKind, Rule, _Format

FIELDS = {
    "v4.14": ("sp_reg:4", "bp_reg:4", "type:2", "end:1"),
    "v6.3": ("sp_reg:4", "bp_reg:4", "type:2", "signal:1", "end:1"),
    "v6.4": ("sp_reg:4", "bp_reg:4", "type:3", "signal:1"),
}


def entry_type(version: str) -> Type:
    prog = Program(Platform(Architecture.X86_64))
    s16 = prog.int_type("s16", 2, True)
    u32 = prog.int_type("unsigned int", 4, False)
    members = [TypeMember(s16, "sp_offset", 0), TypeMember(s16, "bp_offset", 16)]
    bit = 32
    for field in FIELDS[version]:
        name, size = field.split(":")
        value = Object(prog, u32, bit_field_size=int(size))
        members.append(TypeMember(value, name, bit))
        bit += int(size)
    return prog.struct_type("orc_entry", 6, members)


BY_SP = Rule(OrcKind.CALL, Base.SP, 16, Base.NONE, -8, False)
SAVES_BP = Rule(OrcKind.CALL, Base.BP, 16, Base.CFA, -8, False)
REALIGNED = Rule(OrcKind.CALL, Base.BP_AT, 16, Base.BP, -8, False)
EXCEPTION = Rule(OrcKind.REGS, Base.SP, 16, Base.NONE, -8, True)
"""It has no return address."""

NO_SIGNAL = replace(EXCEPTION, interrupted=False)
LAST = Rule(OrcKind.END, Base.NONE, 16, Base.NONE, -8, False)


@pytest.mark.parametrize(
    ("version", "numbering", "flags", "expected"),
    [
        ("v4.14", "first", 0x005, BY_SP),
        ("v6.3", "first", 0x005, BY_SP),
        ("v6.4", "first", 0x205, BY_SP),
        ("v6.4", "second", 0x203, BY_SP),
        ("v4.14", "first", 0x014, SAVES_BP),
        ("v6.4", "first", 0x214, SAVES_BP),
        ("v6.4", "second", 0x284, SAVES_BP),
        ("v6.4", "first", 0x248, REALIGNED),
        ("v6.4", "second", 0x24A, REALIGNED),
        ("v4.14", "first", 0x105, EXCEPTION),
        ("v6.3", "first", 0x505, EXCEPTION),
        ("v6.3", "first", 0x105, NO_SIGNAL),
        ("v6.4", "first", 0xB05, EXCEPTION),
        ("v6.4", "second", 0xB03, EXCEPTION),
        ("v4.14", "first", 0x400, LAST),
        ("v6.3", "first", 0x800, LAST),
        ("v6.4", "first", 0x100, LAST),
        # Undefined or invalid entries.
        ("v4.14", "first", 0x000, BY_FRAME_POINTER),
        ("v6.3", "first", 0x000, BY_FRAME_POINTER),
        ("v6.4", "first", 0x000, BY_FRAME_POINTER),
        ("v6.4", "first", 0x20F, BY_FRAME_POINTER),
        ("v6.4", "first", 0x705, BY_FRAME_POINTER),
    ],
)
def test_entry(version: str, numbering: str, flags: int, expected: Rule) -> None:
    found = _Format(entry_type(version), numbering).rule(16, -8, flags)
    assert found == expected


def test_entry_of_another_size() -> None:
    prog = Program(Platform(Architecture.X86_64))
    with pytest.raises(MissingError):
        _Format(prog.struct_type("orc_entry", 8, ()), "first")
