# SPDX-License-Identifier: LGPL-2.1-or-later

"""The memory that zombies hold, by the sizes that /proc/slabinfo has."""

from dataclasses import replace

import numpy as np
import pytest

from msatools.kernel.report import Findings
from msatools.zombies.held import held_memory
from tests.support.dumps import pairs
from tests.zombies.dumps import ZOMBIES, Dump, read_dump

CACHES = {
    "task_struct": ("task_struct",),
    "signal_struct": ("signal_cache",),
    "sighand_struct": ("sighand_cache",),
    # Newer kernels name it by its type.
    "cred": ("cred_jar", "cred"),
    "pid": ("pid",),
}


@pytest.fixture(scope="module", params=pairs(ZOMBIES))
def dump(request: pytest.FixtureRequest) -> Dump:
    return read_dump(*request.param)


def slab_sizes(dump: Dump) -> dict[str, int]:
    lines = dump.run.truth("proc/slabinfo").decode().splitlines()
    return {line.split()[0]: int(line.split()[3]) for line in lines[2:]}


def test_sizes_are_those_of_the_caches(dump: Dump) -> None:
    findings = Findings()
    held = held_memory(dump.reader, dump.tasks, dump.dead, findings)
    assert not findings.notes
    sizes = slab_sizes(dump)
    for name, caches in CACHES.items():
        (size,) = (sizes[cache] for cache in caches if cache in sizes)
        assert held.each_bytes[name] == size, name
    of_modules = held.each_bytes.keys() - CACHES.keys()
    assert of_modules <= {"task security", "cred security"}
    for name in of_modules:
        assert held.each_bytes[name] in {sizes[f"kmalloc-{n}"] for n in (8, 16, 96)}


def test_sum(dump: Dump) -> None:
    held = held_memory(dump.reader, dump.tasks, dump.dead, Findings())
    each = held.each_bytes
    gone = [
        one for one in dump.workload["zombies"] if one["verdict"] != "leader-exited"
    ]
    threads = len(dump.all_dead()) - len(gone)
    # Those whose process lives have nothing for themselves but the task and its number.
    alone = each["task_struct"] + each["pid"] + each.get("task security", 0)
    expected = sum(each.values()) * len(gone) + alone * threads
    # Each PID namespace that one is in beyond the first adds 16 bytes to its number,
    # and caches have whole lines of 64 bytes.
    nested = [one for one in gone if len(one["ns_pids"]) > 1]
    assert 0 <= held.bytes - expected <= len(nested) * 64


def test_nobody_is_dead(dump: Dump) -> None:
    none = np.empty(0, np.intp)
    held = held_memory(dump.reader, dump.tasks, none, Findings())
    assert (held.bytes, dict(held.each_bytes)) == (0, {})


def test_what_is_lost_is_noted(dump: Dump) -> None:
    records = dump.tasks.records.copy()
    records["signal"][dump.dead] = 1 << 60
    records["address"][dump.dead[0]] = 0xFFFF_8800_0000_0000 - 4096
    findings = Findings()
    broken = replace(dump.tasks, records=records)
    held = held_memory(dump.reader, broken, dump.dead, findings)
    assert {"task_struct", "signal_struct"}.isdisjoint(held.each_bytes)
    assert "cred" in held.each_bytes
    assert findings.lost


def test_many() -> None:
    many = read_dump("manytasks-6.12", "btf")
    before = many.reader.reads
    held = held_memory(many.reader, many.tasks, many.dead, Findings())
    assert many.reader.reads - before < len(many.dead) / 5
    assert held.bytes == 20_000 * sum(held.each_bytes.values())
