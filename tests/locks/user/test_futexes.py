# SPDX-License-Identifier: LGPL-2.1-or-later

"""Futex waiters in the lab's kernels, and in hash tables of other kernels."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from drgn import Object, Type

from msatools.kernel.report import LossLog
from msatools.locks.futexes import Futexes, Waiter
from msatools.locks.struct_reader import Layout
from tests.locks.madememory import BASE, SIZE, MadeMemory
from tests.locks.seen import Seen


def read(tasks: Seen) -> list[Waiter]:
    losses = LossLog()
    mms = set(tasks.table["mm"].tolist()) - {0}
    found = list(Futexes(Layout(tasks.reader), losses).all(mms))
    assert not losses.lost
    return found


def test_exactly_all_waiters_are_found(tasks: Seen) -> None:
    """The servers' and the named waiters are found; one waits on three futexes."""
    expected: Counter[int] = Counter()
    for server in tasks.run.workload["servers"].values():
        expected.update(server["workers"])
    for task in tasks.named.values():
        if task["class"] == "LCK":
            expected[task["tid"]] = len(task["on"].get("addresses", [0]))
    found = Counter(tasks.pids(waiter.task for waiter in read(tasks)))
    assert found == expected
    assert found.total() > 2005


def test_keys(tasks: Seen) -> None:
    waiters = {waiter.task: waiter for waiter in read(tasks)}
    for name in ("futex-wait", "futex-bitset", "futex-pi", "futex-requeue"):
        waiter = waiters[tasks.address(name)]
        assert waiter.key.address == tasks.named[name]["on"]["address"]
        assert waiter.key.object == tasks.table["mm"][tasks.row(name)]
        assert not waiter.key.shared
        assert bool(waiter.pi_state) == (name == "futex-pi")
        assert waiter.bitset == (0xF0 if name == "futex-bitset" else 0xFFFF_FFFF)
    shared = waiters[tasks.address("futex-shared")].key
    assert shared.shared
    assert shared.of_inode
    assert (shared.address, shared.file_offset) == (None, 0)


# --- hash tables that the lab's kernels do not have

TABLES = (BASE + 0x1000, BASE + 0x2000)
VARIABLE, CODE = BASE + 0x800, BASE + 0x9000
MM, PRIVATE = BASE + 0x400, BASE + 0x3000
BUCKET, WAITER = 32, 128
CHAIN, LOCK = 16, 4
NODE, TASK, LOCK_PTR, KEY = 24, 40, 48, 72


class Kernel(MadeMemory):
    """A kernel with futexes only."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols: dict[str, int] = {}
        chain = self.struct("plist_head", 16, node_list=(self.heads, 0))
        node = self.struct("plist_node", 40, node_list=(self.heads, NODE))
        self.bucket = self.struct(
            "futex_hash_bucket", BUCKET, lock=(self.u32, LOCK), chain=(chain, CHAIN)
        )
        key = self.struct("futex_key", 24, word=(self.u64, 8))
        self.struct(
            "futex_q",
            WAITER,
            list=(node, 0),
            task=(self.pointer, TASK),
            lock_ptr=(self.pointer, LOCK_PTR),
            key=(key, KEY),
            pi_state=(self.pointer, 96),
            bitset=(self.u32, 120),
        )
        self.struct("mm_struct", 64)

    def variable(self, name: str, kind: Type, **options: int) -> None:
        """Make a variable.

        :param options: Its ``address`` or ``value``.
        """
        self.variables[name] = lambda: Object(self.prog, kind, **options)

    def empty(self, table: int, buckets: int) -> None:
        for number in range(buckets):
            head = table + number * BUCKET + CHAIN
            self.write(head, head, head)

    def queue(self, table: int, number: int, *waiters: int) -> None:
        """Put waiters on a bucket's chain, each with its own task."""
        bucket = table + number * BUCKET
        self.link(bucket + CHAIN, *(waiter + NODE for waiter in waiters))
        for waiter in waiters:
            self.write(waiter + TASK, waiter + 1, bucket + LOCK)
            self.write(waiter + KEY, MM, 0x7000, 0x10)

    def all(self, *mms: int) -> tuple[list[int], LossLog]:
        losses = LossLog()
        futexes = Futexes(self.layout, losses)
        return [waiter.address for waiter in futexes.all(mms)], losses

    def pointers(self, count: int) -> Type:
        return self.prog.array_type(self.prog.pointer_type(self.bucket), count)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(Layout, "symbol", lambda _, name: made.symbols.get(name))
    for table in TABLES:
        made.empty(table, 4)
    made.queue(TABLES[0], 1, BASE + 0x8000, BASE + 0x8100)
    made.queue(TABLES[1], 3, BASE + 0x8200)
    return made


WAITERS = [BASE + 0x8000, BASE + 0x8100, BASE + 0x8200]


def one_table(kernel: Kernel) -> None:
    """Make the table up to 6.15."""
    pointer = kernel.prog.pointer_type(kernel.bucket)
    data = kernel.struct("", 16, queues=(pointer, 0), hashsize=(kernel.u64, 8))
    kernel.write(VARIABLE, TABLES[0], 4)
    kernel.variable("__futex_data", data, address=VARIABLE)


def by_node(kernel: Kernel) -> None:
    """Make the tables since 6.16: two nodes, and one without a table."""
    data = kernel.struct(
        "",
        48,
        hashmask=(kernel.u64, 0),
        hashshift=(kernel.u32, 8),
        queues=(kernel.pointers(4), 16),
    )
    kernel.write(VARIABLE, 3, 2, TABLES[0], 0, TABLES[1], 0xDEAD)
    kernel.variable("__futex_data", data, address=VARIABLE)
    nodes(kernel)


def by_runtime_constants(kernel: Kernel) -> None:
    """Make tables with runtime constants instead of a structure."""
    pointer = kernel.prog.pointer_type(kernel.prog.pointer_type(kernel.bucket))
    kernel.write(VARIABLE, TABLES[0], 0, TABLES[1])
    kernel.variable("__futex_queues", pointer, value=VARIABLE)
    kernel.variable("__futex_mask", kernel.u32, value=3)
    nodes(kernel)


def by_code(kernel: Kernel) -> None:
    """Make tables whose address is only in an instruction, after another one."""
    pointer = kernel.prog.pointer_type(kernel.prog.pointer_type(kernel.bucket))
    kernel.write(VARIABLE, TABLES[0], 0, TABLES[1])
    kernel.variables["__futex_queues"] = lambda: Object(kernel.prog, pointer)
    kernel.variable("__futex_mask", kernel.u32, value=3)
    nodes(kernel)
    moves = (b"\x48\xb8", BASE + 0x700), (b"\x90\x49\xb9", VARIABLE)
    code = b"".join(move + address.to_bytes(8, "little") for move, address in moves)
    kernel.text(CODE, code)
    kernel.symbols["__futex_hash"] = CODE


def nodes(kernel: Kernel) -> None:
    kernel.variable("nr_node_ids", kernel.u32, value=3)


@pytest.mark.parametrize(
    ("make", "count"),
    [(one_table, 2), (by_node, 3), (by_runtime_constants, 3), (by_code, 3)],
)
def test_common_tables(
    kernel: Kernel, make: Callable[[Kernel], None], count: int
) -> None:
    make(kernel)
    found, losses = kernel.all()
    assert found == WAITERS[:count]
    assert not losses.lost


def hash_member(kernel: Kernel) -> Type:
    return kernel.struct("mm_struct", 64, futex_phash=(kernel.pointer, 16))


def hash_in_data(kernel: Kernel) -> Type:
    data = kernel.struct("futex_mm_data", 16, phash=(kernel.pointer, 8))
    return kernel.struct("mm_struct", 64, futex=(data, 8))


def hash_in_structure(kernel: Kernel) -> Type:
    phash = kernel.struct("futex_mm_phash", 16, hash=(kernel.pointer, 8))
    data = kernel.struct("futex_mm_data", 16, phash=(phash, 0))
    return kernel.struct("mm_struct", 64, futex=(data, 8))


@pytest.mark.parametrize("make", [hash_member, hash_in_data, hash_in_structure])
def test_private_tables(kernel: Kernel, make: Callable[[Kernel], Type]) -> None:
    """Since 6.16 an address space can have a table of its own."""
    one_table(kernel)
    make(kernel)
    buckets = kernel.prog.array_type(kernel.bucket)
    kernel.struct(
        "futex_private_hash", 64, hash_mask=(kernel.u32, 4), queues=(buckets, 64)
    )
    own = BASE + 0x8300
    kernel.write(MM + 16, PRIVATE)
    kernel.write(PRIVATE, 1 << 32)
    kernel.empty(PRIVATE + 64, 2)
    kernel.queue(PRIVATE + 64, 1, own)
    found, losses = kernel.all(MM, MM + 0x100)
    assert found == [*WAITERS[:2], own]
    assert not losses.lost


@pytest.mark.parametrize(
    ("key", "is_waiter"),
    [
        pytest.param((MM, 0x7000, 0x10), True, id="of an address"),
        pytest.param((12345, 3, 0x11), True, id="of a file, in any page"),
        pytest.param((MM, 0x7001, 0x10), False, id="within a page"),
        pytest.param((MM, 0x7000, 0x1010), False, id="past its page"),
    ],
)
def test_waiters_on_a_stack(
    kernel: Kernel, key: tuple[int, int, int], is_waiter: bool
) -> None:
    one_table(kernel)
    first = WAITERS[0]
    kernel.write(first + KEY, *key)
    words = np.frombuffer(kernel.memory, "<u8")[(first - BASE) // 8 :]
    futexes = Futexes(kernel.layout, LossLog())
    found = [waiter.address for waiter in futexes.on_stack(first, words, first + 1)]
    assert found == [first] * is_waiter


@pytest.mark.parametrize(
    "node",
    [
        pytest.param(0, id="null"),
        pytest.param(WAITERS[0] + NODE, id="to an earlier one"),
        pytest.param(WAITERS[1] + NODE, id="to itself"),
        pytest.param(WAITERS[2] + NODE, id="to another bucket"),
        pytest.param(BASE + SIZE, id="out of memory"),
    ],
)
def test_damaged_chain(kernel: Kernel, node: int) -> None:
    """The chain is damaged at its second waiter."""
    one_table(kernel)
    kernel.write(WAITERS[1] + NODE, node)
    found, losses = kernel.all()
    assert found == WAITERS[:2]
    assert losses.coverage["futex_chains_broken"] == 1
    assert losses.lost["futex_chains_broken"] == 1


def test_missing_table(kernel: Kernel) -> None:
    found, losses = kernel.all()
    assert found == []
    assert losses.lost["futex_chains_broken"] == 1
    one_table(kernel)
    kernel.write(VARIABLE, TABLES[0], 1 << 60)
    found, losses = kernel.all()
    assert found == []
    assert losses.lost["futex_chains_broken"] == 1


def test_code_with_another_constant(kernel: Kernel) -> None:
    by_code(kernel)
    kernel.write(VARIABLE, BASE + 0x4000, 0, TABLES[1])  # no chains at this address
    found, findings = kernel.all()
    assert found == []
    assert findings.lost["futex_chains_broken"] == 1


def test_unreadable_variable(kernel: Kernel) -> None:
    one_table(kernel)
    made = kernel.variables["__futex_data"]()
    kernel.variable("__futex_data", made.type_, address=BASE + SIZE)
    found, losses = kernel.all()
    assert found == []
    assert losses.lost["futex_chains_broken"] == 1


def test_partly_unreadable_table(kernel: Kernel) -> None:
    """The first page with two waiters is readable, the next is not."""
    one_table(kernel)
    start = BASE + SIZE - 4096
    kernel.empty(start, 128)
    kernel.queue(start, 5, *WAITERS[:2])
    kernel.write(VARIABLE, start, 256)
    found, losses = kernel.all()
    assert found == WAITERS[:2]
    assert losses.lost["futex_chains_broken"] == 1
