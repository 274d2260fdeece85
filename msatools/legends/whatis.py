# SPDX-License-Identifier: LGPL-2.1-or-later

"""The legend of msa-whatis."""

from msatools.legends.model import Entry, Group, Legend

KINDS = Group(
    "Kinds of answers",
    "kind of answer",
    (
        Entry("task", "a task_struct: PID, name, member at the address"),
        Entry(
            "stack",
            "the kernel stack of a task",
            "The frame and its function; remains below the stack pointer; the "
            "registers of user mode at its end; or the guard page below it.",
        ),
        Entry("slab", "an object of a slab cache, allocated or free"),
        Entry("page", "the page frame, its class as in msa-memstat, its NUMA node"),
        Entry("per-CPU", "a per-CPU variable, or memory of the percpu allocator"),
        Entry("symbol", "a function or variable of the kernel or a module"),
        Entry("vmalloc", "an area of vmalloc: start, size, who allocated it"),
        Entry("memory", "a page of memory, its class and its owner"),
        Entry("user", "memory of a process: mapping, offset in the file, page"),
        Entry(
            "poison",
            "no address: a value that marks memory as invalid",
            "dead000000000122 is LIST_POISON2; 6b6b6b6b6b6b6b6b is a freed object.",
        ),
        Entry("unmapped", "nothing is mapped there, or it is not in the dump"),
        Entry("unknown", "nothing is known"),
        Entry("cgroup", "control group that the page is charged to"),
        Entry("file", "file whose page cache it is"),
        Entry("mappers", "processes that map the page"),
        Entry("flags", "flags of the struct page"),
        Entry("refcount", "references to the page"),
        Entry("content", "whether the byte there is in the dump"),
        Entry("lock", "the lock that lies there"),
    ),
    where="word",
)

FORMS = Group(
    "Forms of an address",
    "form of an address",
    (
        Entry("ffff888003b4e0c0", "virtual address of the kernel, in hex"),
        Entry("phys:", "physical address, in hex"),
        Entry("pfn:", "page frame number: decimal, or hex with 0x"),
        Entry("PID:ADDRESS", "address in the memory of a process"),
        Entry("SYMBOL+OFFSET", "symbol and offset in hex, as in an oops"),
    ),
    where="prefix",
)

OWNERS = Group(
    "Marks before an owner",
    "mark before an owner",
    (Entry("~", "likely: recorded in a field that may be out of date"),),
    where="prefix",
)

LEGEND: Legend = (KINDS, FORMS, OWNERS)
