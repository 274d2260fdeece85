# SPDX-License-Identifier: LGPL-2.1-or-later

"""Damaged dumps, chosen at random, end in an answer or in one line."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from drgn import FaultError
from drgn.helpers.linux.mm import for_each_vma
from drgn.helpers.linux.pid import find_task, for_each_task
from drgn.helpers.linux.slab import find_containing_slab_cache

from tests.fuzz.__main__ import run_seed
from tests.fuzz.cases import LAYERS, Case
from tests.fuzz.dumps import dump, program
from tests.fuzz.judge import GOOD
from tests.fuzz.memory import put
from tests.fuzz.run import run_case
from tests.fuzz.tables import changed_pages

CORE = "6.12"
OF_EACH = 3


def test_damaged_dumps(tmp_path: Path) -> None:
    # For so few it does not pay to prepare all formats of all cores.
    ran = [
        run_seed(f"{layer}:{number}", (layer,), tmp_path, (CORE,))
        for layer in LAYERS
        for number in range(OF_EACH)
    ]
    assert {result.layer for result in ran} == {*LAYERS}
    assert [result.text for result in ran if result.outcome not in GOOD] == []
    # Nothing would be damaged if all answers were the same.
    assert {result.outcome for result in ran} - {"same"}


@pytest.mark.parametrize("command", ["locks", "whatis"])
def test_trees_of_mappings_that_lead_to_themselves(
    command: str, tmp_path: Path
) -> None:
    """Lookups of mappings in them did not end."""
    pages: dict[int, bytes] = {}
    words = []
    for task in for_each_task(program(CORE)):
        if not task.mm:
            continue
        root = task.mm.mm_mt.ma_root.value_()
        # Some nodes are not in the core.
        with suppress(LookupError):
            put(CORE, pages, root & ~0xFF, root.to_bytes(8, "little") * 32)
            words.append(f"{task.pid.value_()}:400000")
    assert len(pages) > 5
    answers_or_refuses(command, words if command == "whatis" else (), pages, tmp_path)


def test_trees_of_areas_that_lead_to_themselves(tmp_path: Path) -> None:
    """Lookups of areas of vmalloc in them did not end."""
    prog = program(CORE)
    nodes = prog["vmap_nodes"]
    pages: dict[int, bytes] = {}
    for index in range(prog["nr_vmap_nodes"].value_()):
        root = nodes[index].busy.root.rb_node.value_()
        put(CORE, pages, root, root.to_bytes(8, "little") * 3)
    stack = prog["init_task"].tasks.next.value_() & -4096
    words = [f"{each:x}" for each in (stack, prog["vmalloc_base"].value_() + 4096)]
    answers_or_refuses("whatis", words, pages, tmp_path)


def test_entries_that_are_their_own_grandparents(tmp_path: Path) -> None:
    """The path of a mapping's file did not end."""
    pages: dict[int, bytes] = {}
    words = []
    for task in for_each_task(program(CORE)):
        # Some mappings and entries are not in the core.
        with suppress(LookupError, FaultError):
            for vma in for_each_vma(task.mm) if task.mm else ():
                if vma.vm_file:
                    entry = vma.vm_file.f_path.dentry
                    place = entry.d_parent.d_parent.address_
                    put(CORE, pages, place, entry.value_().to_bytes(8, "little"))
                    words.append(f"{task.pid.value_()}:{vma.vm_start.value_():x}")
    assert len(pages) > 1
    answers_or_refuses("whatis", words[:30], pages, tmp_path)


def test_cache_whose_objects_have_no_size(tmp_path: Path) -> None:
    """drgn divides by it."""
    pages: dict[int, bytes] = {}
    task = find_task(program(CORE), 1)
    size = find_containing_slab_cache(task).member_("size")
    put(CORE, pages, size.address_, bytes(4))
    answers_or_refuses("whatis", [f"{task.value_() + 8:x}"], pages, tmp_path)


def answers_or_refuses(
    command: str, words: Iterable[str], pages: dict[int, bytes], directory: Path
) -> None:
    """Run a command on a core with other pages, and judge how it ended."""
    changed = dump(CORE, "raw")
    changes = tuple(changed_pages(changed, pages))
    case = Case("made", "memory", changed, command, tuple(words), changes, is_json=True)
    outcome, run = run_case(case, directory)
    assert outcome in GOOD, run.err
