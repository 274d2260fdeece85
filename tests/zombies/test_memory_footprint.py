# SPDX-License-Identifier: LGPL-2.1-or-later

"""The memory that zombies hold; sizes as in /proc/slabinfo: tests/truth/zombies."""

import numpy as np
import pytest

from msatools.kernel.report import LossLog
from msatools.target.addresses import kernel_start
from msatools.zombies.memory_footprint import held_memory
from tests.zombies.dumps import Dump, read_dump


def test_sum(dump: Dump) -> None:
    held = held_memory(dump.reader, dump.table, dump.rows, LossLog())
    each = held.each_bytes
    gone = [
        one for one in dump.workload["zombies"] if one["verdict"] != "leader-exited"
    ]
    threads = len(dump.recorded) - len(gone)
    # Those whose process lives have nothing for themselves but the task and its number.
    alone = each["task_struct"] + each["pid"] + each.get("task security", 0)
    expected = sum(each.values()) * len(gone) + alone * threads
    # Each PID namespace that one is in beyond the first adds 16 bytes to its number,
    # and caches have whole lines of 64 bytes.
    nested = [one for one in gone if len(one["ns_pids"]) > 1]
    assert 0 <= held.bytes - expected <= len(nested) * 64


def test_nobody_is_dead(dump: Dump) -> None:
    none = np.empty(0, np.intp)
    held = held_memory(dump.reader, dump.table, none, LossLog())
    assert (held.bytes, dict(held.each_bytes)) == (0, {})


def test_what_is_lost_is_noted(dump: Dump) -> None:
    below = kernel_start(dump.prog) - 4096
    broken = dump.with_records(
        signal=(dump.rows, 1 << 60), address=(dump.rows[0], below)
    )
    losses = LossLog()
    held = held_memory(dump.reader, broken, dump.rows, losses)
    assert {"task_struct", "signal_struct"}.isdisjoint(held.each_bytes)
    assert "cred" in held.each_bytes
    assert losses.lost


@pytest.mark.long
def test_many() -> None:
    many = read_dump("manytasks-6.12")
    before = many.reader.reads
    held = held_memory(many.reader, many.table, many.rows, LossLog())
    assert many.reader.reads - before < len(many.rows) / 5
    assert held.bytes == 20_000 * sum(held.each_bytes.values())
