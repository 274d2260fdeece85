# SPDX-License-Identifier: LGPL-2.1-or-later

"""Who has a lock and who waits for it, as drgn reads the kernel's own structures."""

from typing import Any

import drgn
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.rbtree import rbtree_inorder_for_each_entry

FLAGS = 7
"""Bits of an owner that are not of its address."""

READERS_SHIFT = 8

Lock = dict[str, Any]
"""As the lab's module tells of it."""


def pid_at(prog: drgn.Program, pointer: int) -> int:
    address = pointer & ~FLAGS
    if not address:
        return 0
    return int(drgn.Object(prog, "struct task_struct *", address).pid)


def owner(prog: drgn.Program, lock: Lock) -> tuple[int, int] | None:
    """Who the lock itself says holds it, and how many readers; None if it cannot.

    Of readers it is the last that has come, who may have gone.
    """
    if lock["type"] in ("mutex", "ww_mutex"):
        mutex = drgn.Object(prog, "struct mutex", address=int(lock["address"], 16))
        return pid_at(prog, int(mutex.owner.counter)), 0
    if lock["type"] == "rt_mutex":
        mutex = drgn.Object(prog, "struct rt_mutex", address=int(lock["address"], 16))
        return pid_at(prog, int(mutex.rtmutex.owner)), 0
    if lock["type"] == "rwsem":
        at = int(lock["address"], 16)
        sem = drgn.Object(prog, "struct rw_semaphore", address=at)
        count = int(sem.count.counter)
        return pid_at(prog, int(sem.owner.counter)), count >> READERS_SHIFT
    return None


def tasks_in(
    head: drgn.Object, waiter: str, link: str, task: str = "task"
) -> list[int]:
    """PIDs of a list of waiters."""
    return [
        pid_at(head.prog_, int(entry.member_(task)))
        for entry in list_for_each_entry(f"struct {waiter}", head, link)
    ]


def mutex_queue(prog: drgn.Program, at: int) -> list[int]:
    mutex = drgn.Object(prog, "struct mutex", address=at)
    return tasks_in(mutex.wait_list.address_of_(), "mutex_waiter", "list")


def rwsem_queue(prog: drgn.Program, at: int) -> list[int]:
    sem = drgn.Object(prog, "struct rw_semaphore", address=at)
    return tasks_in(sem.wait_list.address_of_(), "rwsem_waiter", "list")


def semaphore_queue(prog: drgn.Program, at: int) -> list[int]:
    sem = drgn.Object(prog, "struct semaphore", address=at)
    return tasks_in(sem.wait_list.address_of_(), "semaphore_waiter", "list")


def rt_mutex_queue(prog: drgn.Program, at: int) -> list[int]:
    mutex = drgn.Object(prog, "struct rt_mutex", address=at).rtmutex
    waiter = prog.type("struct rt_mutex_waiter")
    # Since 6.6 both of a waiter's nodes have what they are sorted by with them.
    link = "tree.entry" if waiter.has_member("tree") else "tree_entry"
    root = mutex.waiters.rb_root.address_of_()
    return [
        pid_at(prog, int(entry.task))
        for entry in rbtree_inorder_for_each_entry(waiter, root, link)
    ]


def percpu_queue(prog: drgn.Program, at: int) -> list[int]:
    """The writer that waits for readers first, who is in no queue."""
    sem = drgn.Object(prog, "struct percpu_rw_semaphore", address=at)
    writer = pid_at(prog, int(sem.writer.task))
    queue = wait_queue(prog, int(sem.waiters.address_of_()))
    return [writer, *queue] if writer else queue


def completion_queue(prog: drgn.Program, at: int) -> list[int]:
    head = drgn.Object(prog, "struct completion", address=at).wait.task_list
    return tasks_in(head.address_of_(), "swait_queue", "task_list")


def wait_queue(prog: drgn.Program, at: int) -> list[int]:
    head = drgn.Object(prog, "struct wait_queue_head", address=at).head
    return tasks_in(head.address_of_(), "wait_queue_entry", "entry", "private")


def bit_queue(prog: drgn.Program, at: int) -> list[int]:
    """Who waits for a bit of the word; the table has waiters of other words too."""
    return [
        pid_at(prog, int(entry.wq_entry.private))
        for bucket in prog["bit_wait_table"]
        for entry in list_for_each_entry(
            "struct wait_bit_queue_entry", bucket.head.address_of_(), "wq_entry.entry"
        )
        if int(entry.key.flags) == at
    ]


QUEUES = {
    "mutex": mutex_queue,
    "ww_mutex": mutex_queue,
    "rwsem": rwsem_queue,
    "semaphore": semaphore_queue,
    "rt_mutex": rt_mutex_queue,
    "percpu_rwsem": percpu_queue,
    "completion": completion_queue,
    "wait_queue": wait_queue,
    "bit_wait": bit_queue,
}
