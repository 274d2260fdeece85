# SPDX-License-Identifier: LGPL-2.1-or-later

"""Read a lock's owner and waiters from the kernel's structures, without msatools."""

from typing import Any

import drgn
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.rbtree import rbtree_inorder_for_each_entry

FLAGS = 7
"""Flag bits in an owner's address."""

READERS_SHIFT = 8

Lock = dict[str, Any]
"""A lock as the lab's module records it."""


def pid_at(prog: drgn.Program, pointer: int) -> int:
    address = pointer & ~FLAGS
    if not address:
        return 0
    return int(drgn.Object(prog, "struct task_struct *", address).pid)


def owner(prog: drgn.Program, lock: Lock) -> tuple[int, int] | None:
    """Return the PID of the owner and the number of readers; None if not recorded.

    If readers hold the lock, the owner is the last reader to acquire it, which may have
    released it since.
    """
    if lock["type"] in ("mutex", "ww_mutex"):
        mutex = drgn.Object(prog, "struct mutex", address=int(lock["address"], 16))
        return pid_at(prog, int(mutex.owner.counter)), 0
    if lock["type"] == "rt_mutex":
        mutex = drgn.Object(prog, "struct rt_mutex", address=int(lock["address"], 16))
        return pid_at(prog, int(mutex.rtmutex.owner)), 0
    if lock["type"] == "rwsem":
        address = int(lock["address"], 16)
        sem = drgn.Object(prog, "struct rw_semaphore", address=address)
        count = int(sem.count.counter)
        return pid_at(prog, int(sem.owner.counter)), count >> READERS_SHIFT
    return None


def tasks_in(
    head: drgn.Object, waiter: str, link: str, task: str = "task"
) -> list[int]:
    """Return the PIDs in a list of waiters."""
    return [
        pid_at(head.prog_, int(entry.member_(task)))
        for entry in list_for_each_entry(f"struct {waiter}", head, link)
    ]


def mutex_queue(prog: drgn.Program, address: int) -> list[int]:
    mutex = drgn.Object(prog, "struct mutex", address=address)
    return tasks_in(mutex.wait_list.address_of_(), "mutex_waiter", "list")


def rwsem_queue(prog: drgn.Program, address: int) -> list[int]:
    sem = drgn.Object(prog, "struct rw_semaphore", address=address)
    return tasks_in(sem.wait_list.address_of_(), "rwsem_waiter", "list")


def semaphore_queue(prog: drgn.Program, address: int) -> list[int]:
    sem = drgn.Object(prog, "struct semaphore", address=address)
    return tasks_in(sem.wait_list.address_of_(), "semaphore_waiter", "list")


def rt_mutex_queue(prog: drgn.Program, address: int) -> list[int]:
    mutex = drgn.Object(prog, "struct rt_mutex", address=address).rtmutex
    waiter = prog.type("struct rt_mutex_waiter")
    # Since 6.6 a waiter's tree nodes are struct rt_waiter_node, with their sort keys.
    link = "tree.entry" if waiter.has_member("tree") else "tree_entry"
    root = mutex.waiters.rb_root.address_of_()
    return [
        pid_at(prog, int(entry.task))
        for entry in rbtree_inorder_for_each_entry(waiter, root, link)
    ]


def percpu_queue(prog: drgn.Program, address: int) -> list[int]:
    """Return the writer that waits for readers, which is in no queue, and the queue."""
    sem = drgn.Object(prog, "struct percpu_rw_semaphore", address=address)
    writer = pid_at(prog, int(sem.writer.task))
    queue = wait_queue(prog, int(sem.waiters.address_of_()))
    return [writer, *queue] if writer else queue


def completion_queue(prog: drgn.Program, address: int) -> list[int]:
    head = drgn.Object(prog, "struct completion", address=address).wait.task_list
    return tasks_in(head.address_of_(), "swait_queue", "task_list")


def wait_queue(prog: drgn.Program, address: int) -> list[int]:
    head = drgn.Object(prog, "struct wait_queue_head", address=address).head
    return tasks_in(head.address_of_(), "wait_queue_entry", "entry", "private")


def bit_queue(prog: drgn.Program, address: int) -> list[int]:
    """Return the waiters for a bit of the word; its hash buckets hold others too."""
    return [
        pid_at(prog, int(entry.wq_entry.private))
        for bucket in prog["bit_wait_table"]
        for entry in list_for_each_entry(
            "struct wait_bit_queue_entry", bucket.head.address_of_(), "wq_entry.entry"
        )
        if int(entry.key.flags) == address
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
