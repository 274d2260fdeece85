# SPDX-License-Identifier: LGPL-2.1-or-later

"""Kernels of which there is nothing but tasks, their stacks and locks, all of bytes."""

import struct
from collections.abc import Mapping, Sequence

import numpy as np
from drgn import (
    Architecture,
    Platform,
    Program,
    Type,
    TypeKind,
    TypeKindSet,
    TypeMember,
)

from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.locks.layout import Layout
from msatools.locks.look import Case, Look
from msatools.locks.ownstack import OwnStack
from msatools.locks.sleeping.kernellocks import KernelLocks
from msatools.tasks.classes import TaskClass
from msatools.tasks.table import TaskTable

BASE = 0xFFFF_8880_0000_0000
SIZE = 0x10000
LOCK, OTHER_LOCK = BASE + 0x108, BASE + 0x208
TASKS = [BASE + 0x1000 + 0x100 * number for number in range(8)]
STACKS = [BASE + 0x4000 + 0x400 * number for number in range(8)]
STACK_BYTES = 0x400
WAITER_AT = 0x200
"""Of each waiter on its stack."""

WAITERS = [stack + WAITER_AT for stack in STACKS]
PID, TASK_BYTES = 8, 0x80


class MadeKernel:
    """Types that are told, and memory that can be written."""

    def __init__(self) -> None:
        self.memory = bytearray(SIZE)
        self.types: dict[str, Type] = {}
        self.prog = Program(Platform(Architecture.X86_64))
        self.prog.add_memory_segment(BASE, SIZE, self._read)
        self.prog.register_type_finder("made", self._type, enable_index=0)
        self.word = self.prog.int_type("unsigned long", 8, False)
        self.half = self.prog.int_type("unsigned int", 4, False)
        self.pointer = self.prog.pointer_type(self.prog.void_type())
        self.atomic = self.struct("atomic", 8, counter=(self.word, 0))
        self.heads = self.struct(
            "list_head", 16, next=(self.pointer, 0), prev=(self.pointer, 8)
        )
        self.findings = Findings()
        self.columns: dict[str, Sequence[int]] = {}
        self.add_task_type()
        for number, task in enumerate(TASKS):
            self.write_half(task + PID, 100 + number)

    def _read(self, address: int, count: int, offset: int, physical: bool) -> bytes:
        return bytes(self.memory[offset : offset + count])

    def _type(
        self, prog: Program, kinds: TypeKindSet, name: str, filename: str | None
    ) -> Type | None:
        return self.types.get(name) if TypeKind.STRUCT in kinds else None

    def struct(self, name: str, size: int, **members: tuple[Type, int]) -> Type:
        made = self.prog.struct_type(
            name,
            size,
            [TypeMember(type_, key, 8 * at) for key, (type_, at) in members.items()],
        )
        self.types[name] = made
        return made

    def add_task_type(self, **members: tuple[Type, int]) -> None:
        pid = {"pid": (self.half, PID), "tgid": (self.half, PID + 4)}
        self.struct("task_struct", TASK_BYTES, **pid, **members)

    def write(self, address: int, *words: int) -> None:
        self._write(address, struct.pack(f"<{len(words)}Q", *words))

    def write_half(self, address: int, *halves: int) -> None:
        self._write(address, struct.pack(f"<{len(halves)}I", *halves))

    def _write(self, address: int, data: bytes) -> None:
        self.memory[address - BASE : address - BASE + len(data)] = data

    def link(self, *nodes: int) -> None:
        """Make a ring."""
        for place, node in enumerate(nodes):
            self.write(node, nodes[(place + 1) % len(nodes)], nodes[place - 1])

    @property
    def layout(self) -> Layout:
        return Layout(Reader(self.prog))

    def locks(self) -> KernelLocks:
        return KernelLocks(self.layout, self.findings)

    def stack(self, number: int) -> OwnStack:
        """What a task has on its stack."""
        start = STACKS[number] - BASE
        words = np.frombuffer(bytes(self.memory[start : start + STACK_BYTES]), "<u8")
        return OwnStack(self.layout, TASKS[number], STACKS[number], words)

    def look(self) -> Look:
        """Look at the tasks, with what their records say in ``columns``."""
        names = ("address", "pid", "tgid", *self.columns)
        records = np.zeros(len(TASKS), [(name, "u8") for name in names])
        records["address"] = TASKS
        records["pid"] = records["tgid"] = 100 + np.arange(len(TASKS))
        for name, values in self.columns.items():
            records[name] = values
        look = Look.__new__(Look)
        look.layout, look.findings = self.layout, self.findings
        look.reader, look.limit, look.alone = look.layout.reader, 1000, False
        look.tasks = TaskTable(records, frozenset(names))
        look.locks = KernelLocks(look.layout, self.findings)
        return look

    def case(self, number: int, *names: str) -> Case:
        """Make a task's case, with the functions on its stack."""
        return Case(
            row=number,
            address=TASKS[number],
            mm=0,
            task_class=TaskClass.KLK,
            names=("__schedule", "schedule", *names),
            call=None,
            arguments=[0] * 6,
            plain=False,
            stack=self.stack(number),
        )


def per_task(values: Mapping[int, int]) -> list[int]:
    """Give a column of the table of tasks, 0 for those that are not named."""
    return [values.get(number, 0) for number in range(len(TASKS))]
