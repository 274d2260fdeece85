# SPDX-License-Identifier: LGPL-2.1-or-later

"""Names are read up to their end, even if memory ends there."""

import pytest

from msatools.errors import MissingError
from msatools.kernel.reader import decode_string
from msatools.kernel.slab import slab_caches
from tests.locks.madememory import BASE, MadeMemory

PAGE = 4096


@pytest.fixture
def made() -> MadeMemory:
    return MadeMemory()


def test_name_across_a_page_boundary(made: MadeMemory) -> None:
    """The name of a slab cache is not cut at the end of its page."""
    made.struct(
        "kmem_cache",
        64,
        list=(made.heads, 0),
        name=(made.pointer, 16),
        size=(made.u32, 24),
    )
    made.link(BASE, BASE + 0x100)
    made.write(BASE + 0x110, BASE + PAGE - 3, 64)
    made.text(BASE + PAGE - 3, b"kmalloc-64")
    made.variable("slab_caches", made.heads, BASE)
    caches = slab_caches(made.layout.reader, made.losses)
    assert [cache.name for cache in caches] == ["kmalloc-64"]


def test_text_of_an_array_is_at_most_its_length(made: MadeMemory) -> None:
    """Memory after a full array is not part of the text."""
    letters = made.prog.array_type(made.prog.int_type("char", 1, True), 4)
    made.struct("gendisk", 16, disk_name=(letters, 4))
    made.text(BASE + 4, b"vda1more")
    assert made.layout.text(BASE, "gendisk", "name", "disk_name") == "vda1"
    with pytest.raises(MissingError, match="no name"):
        made.layout.text(BASE, "gendisk", "name")


def test_invalid_text_is_escaped() -> None:
    assert decode_string(b"a\xff\0b") == "a\\xff"
    assert decode_string(b"whole") == "whole"
