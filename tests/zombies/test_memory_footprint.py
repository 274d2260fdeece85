# SPDX-License-Identifier: LGPL-2.1-or-later

"""Memory held by zombies; object sizes are facts in tests/truth/zombies.py."""

import numpy as np
import pytest

from msatools.kernel.report import LossLog
from msatools.program.linear import kernel_start
from msatools.zombies.limits import held_memory
from tests.zombies.dumps import Dump, read_dump


def test_sum(dump: Dump) -> None:
    held = held_memory(dump.reader, dump.table, dump.rows, LossLog())
    sizes = held.each_bytes
    gone = [
        one for one in dump.workload["zombies"] if one["verdict"] != "leader-exited"
    ]
    threads = len(dump.recorded) - len(gone)
    # A dead thread of a living process holds only its task and PID structures.
    alone = sizes["task_struct"] + sizes["pid"] + sizes.get("task security", 0)
    expected = sum(sizes.values()) * len(gone) + alone * threads
    # Each PID namespace beyond the first adds 16 bytes to struct pid, rounded up to a
    # cache line of 64 bytes.
    nested = [one for one in gone if len(one["ns_pids"]) > 1]
    assert 0 <= held.bytes - expected <= len(nested) * 64


def test_no_zombies(dump: Dump) -> None:
    none = np.empty(0, np.intp)
    held = held_memory(dump.reader, dump.table, none, LossLog())
    assert (held.bytes, dict(held.each_bytes)) == (0, {})


def test_losses_are_noted(dump: Dump) -> None:
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
