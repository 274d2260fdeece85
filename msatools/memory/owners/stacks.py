# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Finds the kernel stacks of a kernel without CONFIG_VMAP_STACK.

They are pages of the direct map there (kernel/fork.c, alloc_thread_stack_node()). With
it they are areas of vmalloc.
"""

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import Addresses, Reader, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.structs import read_structs
from msatools.selfdesc.find import find_type, find_variable
from msatools.target.addresses import code_start
from msatools.target.linear import page_address
from msatools.tasks.stackmemory import stack_bytes
from msatools.tasks.table import TaskReader


def has_vmapped_stacks(prog: drgn.Program) -> bool:
    """Return whether kernel stacks are areas of vmalloc."""
    return bool(find_type(prog, "struct task_struct").has_member("stack_vm_area"))


def charged_stack_pages(prog: drgn.Program) -> int:
    """Return the pages of a stack of which only the first has a control group.

    Pages that are allocated together, and are no compound page, are charged by the
    first of them (mm/memcontrol.c, __memcg_kmem_charge_page()). Of stacks in vmalloc
    memory each page is.
    """
    if has_vmapped_stacks(prog):
        return 1
    return max(stack_bytes(prog) // int(find_variable(prog, "PAGE_SIZE").value_()), 1)


def direct_stacks(reader: Reader, losses: LossLog) -> npt.NDArray[np.uint64]:
    """
    Return the pfns of the stacks of all threads and idle tasks.

    The stack of the first idle task is in the kernel's image, and not among them.
    """
    prog = reader.prog
    size = stack_bytes(prog)
    page = find_variable(prog, "PAGE_SIZE").value_()
    stacks = np.concatenate(
        (TaskReader(reader).read_all(losses)["stack"], _idle_stacks(reader, losses))
    )
    start = np.uint64(page_address(prog, 0))
    direct = (stacks >= start) & (stacks < np.uint64(code_start(prog)))
    offsets = distinct(stacks[direct]) - start
    pages = np.arange(size // page, dtype=np.uint64)
    return (offsets[:, None] // np.uint64(page) + pages).ravel()


def _idle_stacks(reader: Reader, losses: LossLog) -> Addresses:
    queues = read_percpu(reader, losses).addresses("runqueues")
    idle = read_structs(reader, "struct rq", {"idle": ("idle",)}, queues, losses)
    stack = {"stack": ("stack",)}
    tasks = read_structs(reader, "struct task_struct", stack, idle["idle"], losses)
    found: Addresses = tasks["stack"].astype(np.uint64)
    return found
