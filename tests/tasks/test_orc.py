# SPDX-License-Identifier: LGPL-2.1-or-later

"""ORC entries of each kernel version are decoded."""

import pytest
from drgn import Architecture, Object, Platform, Program, Type, TypeMember

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


@pytest.mark.parametrize(
    ("version", "numbering", "flags", "expected"),
    [
        # A call, with the CFA at an offset from the stack pointer.
        (
            "v4.14",
            "first",
            0x005,
            Rule(OrcKind.CALL, Base.SP, 16, Base.NONE, -8, False),
        ),
        ("v6.3", "first", 0x005, Rule(OrcKind.CALL, Base.SP, 16, Base.NONE, -8, False)),
        ("v6.4", "first", 0x205, Rule(OrcKind.CALL, Base.SP, 16, Base.NONE, -8, False)),
        (
            "v6.4",
            "second",
            0x203,
            Rule(OrcKind.CALL, Base.SP, 16, Base.NONE, -8, False),
        ),
        # The frame pointer saved beside the return address.
        ("v4.14", "first", 0x014, Rule(OrcKind.CALL, Base.BP, 16, Base.CFA, -8, False)),
        ("v6.4", "first", 0x214, Rule(OrcKind.CALL, Base.BP, 16, Base.CFA, -8, False)),
        ("v6.4", "second", 0x284, Rule(OrcKind.CALL, Base.BP, 16, Base.CFA, -8, False)),
        # A realigned stack.
        (
            "v6.4",
            "first",
            0x248,
            Rule(OrcKind.CALL, Base.BP_AT, 16, Base.BP, -8, False),
        ),
        (
            "v6.4",
            "second",
            0x24A,
            Rule(OrcKind.CALL, Base.BP_AT, 16, Base.BP, -8, False),
        ),
        # An exception frame, which has no return address.
        ("v4.14", "first", 0x105, Rule(OrcKind.REGS, Base.SP, 16, Base.NONE, -8, True)),
        ("v6.3", "first", 0x505, Rule(OrcKind.REGS, Base.SP, 16, Base.NONE, -8, True)),
        ("v6.3", "first", 0x105, Rule(OrcKind.REGS, Base.SP, 16, Base.NONE, -8, False)),
        ("v6.4", "first", 0xB05, Rule(OrcKind.REGS, Base.SP, 16, Base.NONE, -8, True)),
        ("v6.4", "second", 0xB03, Rule(OrcKind.REGS, Base.SP, 16, Base.NONE, -8, True)),
        # The end of the stack.
        (
            "v4.14",
            "first",
            0x400,
            Rule(OrcKind.END, Base.NONE, 16, Base.NONE, -8, False),
        ),
        (
            "v6.3",
            "first",
            0x800,
            Rule(OrcKind.END, Base.NONE, 16, Base.NONE, -8, False),
        ),
        (
            "v6.4",
            "first",
            0x100,
            Rule(OrcKind.END, Base.NONE, 16, Base.NONE, -8, False),
        ),
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
