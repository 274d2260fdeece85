# SPDX-License-Identifier: LGPL-2.1-or-later

"""Columns of structures have the widths and signs of the members' types."""

import drgn
import numpy as np
import pytest

from msatools.errors import MissingError
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import WordArray, read_struct, read_structs, struct_layout
from tests.support.madetypes import made_program, serve, struct
from tests.support.overlay import put

START = 0xFFFF_8880_0000_1000
RECORD = b"\xff\xff" + b"\xfe\xff\xff\xff" + b"vda\0" + bytes(range(16))


@pytest.fixture
def reader() -> Reader:
    prog = made_program()
    short = prog.int_type("unsigned short", 2, False)
    number = prog.int_type("int", 4, True)
    byte = prog.int_type("char", 1, True)
    mask = prog.struct_type(
        "nodemask_t",
        16,
        [drgn.TypeMember(prog.array_type(prog.int_type("unsigned long", 8, False), 2))],
    )
    flag = drgn.Object(
        prog, prog.int_type("unsigned int", 4, False), 0, bit_field_size=3
    )
    made = struct(
        prog,
        "made",
        32,
        mode=(short, 0),
        state=(number, 2),
        name=(prog.array_type(byte, 4), 6),
        nodes=(mask, 10),
        flags=(flag, 28),
    )
    serve(prog, [made])
    put(prog, START, RECORD)
    return Reader(prog)


def test_columns(reader: Reader) -> None:
    """No byte is read past the last member, where memory ends."""
    members = {
        "mode": ("newer", "mode"),
        "state": ("state",),
        "name": ("name",),
        "nodes": WordArray(("nodes",)),
        "none": ("newest",),
    }
    addresses = np.array([START, 0, START], np.uint64)
    found = read_structs(reader, "struct made", members, addresses, LossLog())
    assert found.readable.tolist() == [True, False, True]
    assert found["mode"].tolist() == [0xFFFF, 0, 0xFFFF]
    assert found["state"].tolist() == [-2, 0, -2]
    assert found["name"].tolist() == [b"vda", b"", b"vda"]
    assert found["nodes"][0].tobytes() == bytes(range(16))
    assert found["nodes"].shape == (3, 2)
    assert not found.has("none")


def test_one_structure(reader: Reader) -> None:
    members = {"mode": ("mode",), "state": ("state",), "none": ("newest",)}
    found = read_struct(reader, "struct made", members, START)
    assert found == {"mode": 0xFFFF, "state": -2}
    assert reader.bytes == 6
    with pytest.raises(drgn.FaultError):
        read_struct(reader, "struct made", members, 0)


def test_bit_field_is_refused(reader: Reader) -> None:
    with pytest.raises(MissingError, match="bit field"):
        struct_layout(reader, "struct made", {"flags": ("flags",)})
