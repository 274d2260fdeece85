# SPDX-License-Identifier: LGPL-2.1-or-later

"""drgn's crash commands: each with its options, with debug info and without."""

import io
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

from drgn import Program, cast
from drgn.cli import default_globals
from drgn.commands._crash.common import CRASH_COMMAND_NAMESPACE
from drgn.helpers.linux.fs import fget
from drgn.helpers.linux.mm import for_each_vma
from drgn.helpers.linux.pid import find_task

LINES = (
    "set 1",
    "*task_struct.pid,comm {task}",
    "ascii 62696c2f7273752f",
    "bpf",
    "bpf -p 1",
    "bpf -m 1",
    "bpf -s -p 1",
    "bt",
    "bt 1",
    "bt -a",
    "bt -c 0",
    "bt -f 1",
    "bt -F 1",
    "bt -d 1",
    "bt -l 1",
    "bt -V 1",
    "btop {page_address}",
    "dev",
    "dev -i",
    "dev -p",
    "dev -d",
    "dev -D",
    "drgn print(prog['init_task'].comm)",
    "eval -b 0x1234 + 1",
    "eval -l (1 << 30)",
    "files 1",
    "files -c 1",
    "files -d {dentry}",
    "files -p {inode}",
    "files -R 0 1",
    "foreach kernel bt",
    "foreach user vm",
    "foreach files",
    "foreach user sig",
    "foreach R ps",
    "help",
    "help bt",
    "ipcs",
    "ipcs -s",
    "ipcs -m",
    "ipcs -q",
    "ipcs -n 1",
    "irq",
    "irq -u",
    "irq -d",
    "irq -b",
    "irq -a",
    "irq -s",
    "irq -s -c 0",
    "irq 1",
    "kmem {task}",
    "kmem -f",
    "kmem -F",
    "kmem -i",
    "kmem -v",
    "kmem -V",
    "kmem -n",
    "kmem -z",
    "kmem -o",
    "kmem -h",
    "kmem -p",
    "kmem -m flags,_refcount",
    "kmem -s",
    "kmem -s task_struct",
    "kmem -s {task}",
    "kmem -v {vmalloc}",
    "kmem -g",
    "kmem -g 1400",
    "kmem -I task_struct -s",
    "list modules",
    "list -H modules -o module.list -s module.name",
    "list -o task_struct.tasks -s task_struct.pid,comm -h {task}",
    "log",
    "log -T",
    "log -t",
    "mod",
    "mod -t",
    "mount",
    "mount -n 1",
    "net",
    "net -a",
    "p jiffies",
    "p -x init_task.flags",
    "p runqueues:0",
    "p linux_proc_banner",
    "ps",
    "ps -k",
    "ps -u",
    "ps -G",
    "ps -y FIFO",
    "ps -A",
    "ps -s",
    "ps -p 1",
    "ps -c 1",
    "ps -t 1",
    "ps -l",
    "ps -m",
    "ps -a 1",
    "ps -g 1",
    "ps -r 1",
    "ps -S",
    "ps -C 0 -l",
    "ps -H",
    "ptob 1000",
    "ptov 1000",
    "ptov {percpu}:a",
    "rd linux_banner 8",
    "rd -S {task} 32",
    "rd -a linux_banner",
    "rd -s {task} 32",
    "rd -p 1000",
    "runq",
    "runq -t",
    "runq -T",
    "runq -m",
    "runq -g",
    "runq -c 0",
    "search -s {task} -l 4096 {task}",
    "search -t {task}",
    "search -s {task} -l 4096 -c init",
    "set",
    "set -c 0",
    "set radix",
    "sig 1",
    "sig -g 1",
    "sig -l",
    "sig -s 4002",
    "struct list_head",
    "struct task_struct.pid,comm {task}",
    "struct rq.nr_running runqueues:a",
    "struct -l task_struct.tasks task_struct.pid {tasks}",
    "struct task_struct",
    "struct timespec64 -x",
    "swap",
    "sym schedule",
    "sym {schedule}",
    "sym -q vfs_read",
    "sym -n schedule",
    "sym -p schedule",
    "sym -l",
    "sys",
    "task 1",
    "task -R pid,comm 1",
    "timer",
    "timer -r",
    "timer -C 0",
    "tree -t rbtree -o backing_dev_info.rb_node bdi_tree",
    "tree -t maple {maple}",
    "tree -t xarray {xarray}",
    "union sigval",
    "vm 1",
    "vtop {task}",
    "vtop -c 1 {user}",
    "waitq signal_struct.wait_chldexit {signal}",
    "waitq {waitq}",
    "whatis init_task",
    "whatis task_struct",
    "whatis schedule",
    "whatis PIDTYPE_PID",
    "exit",
    "q",
)


SLOW = (
    *("foreach files", "irq -d", "kmem -F", "kmem -f", "kmem -m", "kmem -p", "kmem -s"),
    *("kmem -I", "kmem -v", "search -t", "sym -l", "sym -n", "sym -p", "sym -q"),
)
"""How lines begin that walk all of a dump or all symbols."""


def fields(prog: Program) -> dict[str, str]:
    """Return what stands for addresses in :data:`LINES`, on one dump."""
    task = find_task(prog, 1)
    file = fget(task, 0)
    found = {
        "task": task,
        "tasks": task.tasks.address_of_(),
        "dentry": file.f_path.dentry,
        "inode": task.fs.root.dentry.d_inode,
        "page_address": cast("unsigned long", prog["init_task"].stack),
        "schedule": prog["schedule"].address_of_(),
        "vmalloc": cast("unsigned long", task.stack),
        "signal": task.signal,
        "percpu": prog["runqueues"].address_of_(),
        "waitq": task.signal.wait_chldexit.address_of_(),
        "xarray": task.fs.root.dentry.d_inode.i_mapping.i_pages.address_of_(),
    }
    made = {name: f"{value.value_():x}" for name, value in found.items()}
    first = next(iter(for_each_vma(task.mm)))
    made["user"] = f"{first.vm_start.value_():x}"
    made["maple"] = "0"
    if task.mm.type_.type.has_member("mm_mt"):
        made["maple"] = f"{task.mm.mm_mt.address_of_().value_():x}"
    return made


@dataclass(frozen=True)
class Said:
    """What a command printed, and by which error it ended."""

    out: str
    error: str


def say(prog: Program, line: str, places: Mapping[str, str]) -> Said:
    """Run one command."""
    for name, value in places.items():
        line = line.replace(f"{{{name}}}", value)
    out = io.StringIO()
    error = ""
    with redirect_stdout(out), redirect_stderr(out):
        try:
            CRASH_COMMAND_NAMESPACE.run(prog, line, globals=default_globals(prog))
        except BaseException as caught:
            error = f"{type(caught).__name__}: {caught}"
    return Said(out.getvalue(), error)
