# SPDX-License-Identifier: LGPL-2.1-or-later

"""The declared types of the kernel's variables, which BTF does not describe.

One line for each: the type, the name, and what must be so of a kernel for the line to
hold there, where that differs between kernels; the newest first. Array lengths are
numbers that no configuration changes, or enumerators; where neither tells, none is
given, and the array has no length. ``struct {a b}`` is the one structure without a name
that has just these members.

The tests hold every line against DWARF on each kernel of the lab.
"""

import re
from dataclasses import dataclass

from drgn import Program, Type

from msatools.selfdesc.types import BtfTypes


class NotSoError(LookupError):
    """What a declaration presumes is not so of this kernel."""


@dataclass(frozen=True)
class Declaration:
    """One line of the table."""

    name: str
    element: str
    """The type, in C, without the lengths of arrays."""

    lengths: tuple[str, ...] = ()
    """Of arrays, the outermost first: a number, an enumerator, or empty for none."""

    condition: str = ""
    """A type, ``type.member`` or enumerator that must be there; ``!`` for must not."""

    def resolve(self, types: BtfTypes) -> Type:
        """Make the type, out of those that this kernel has.

        :raises LookupError: if the kernel does not have what the line is made of
        """
        prog = types.prog
        if self.condition and not _holds(prog, self.condition):
            raise NotSoError(f"it is not so that {self.condition}")
        members = re.fullmatch(r"struct \{(.*)\}", self.element)
        if members:
            made = types.find_anonymous(members[1].split())
        else:
            made = prog.type(self.element)
        for length in reversed(self.lengths):
            made = prog.array_type(made, *_length(prog, length))
        return made


def _holds(prog: Program, condition: str) -> bool:
    negated = condition.startswith("!")
    type_name, _, member = condition.lstrip("!").partition(".")
    try:
        if " " not in type_name:
            prog.constant(type_name)
        elif member:
            prog.type(type_name).member(member)
        else:
            prog.type(type_name)
    except LookupError:
        return negated
    return not negated


def _length(prog: Program, length: str) -> tuple[int, ...]:
    if not length:
        return ()
    if length.isdigit():
        return (int(length),)
    value: int = prog.constant(length).value_()
    return (value,)


def parse(text: str) -> dict[str, tuple[Declaration, ...]]:
    """Parse lines of ``type | name`` or ``type | name | condition``.

    :raises ValueError: if a line is none
    """
    table: dict[str, tuple[Declaration, ...]] = {}
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        fields = [field.strip() for field in line.split("|")]
        if not 2 <= len(fields) <= 3 or not all(fields):
            raise ValueError(f"not a declaration: {line}")
        element, name, *condition = fields
        lengths = tuple(re.findall(r"\[(\w*)\]", element))
        declaration = Declaration(
            name, element.partition("[")[0].strip(), lengths, *condition
        )
        table[name] = (*table.get(name, ()), declaration)
    return table


FUNCTIONS = frozenset({"vmemmap_populate"})
"""Functions of which only the presence is asked, and which older BTF (5.10) lacks."""

TABLE = parse(
    """
    struct {seq timekeeper} | tk_core
    const struct file_operations | pipefifo_fops
    const struct file_operations | pipeanon_fops
    const struct file_operations | socket_file_ops
    struct proto | tcp_prot
    struct proto | tcpv6_prot
    # Per-CPU variables, for kernels whose BTF lacks them (Debian's 5.10)
    struct rq | runqueues
    struct vm_event_state | vm_event_states
    struct vm_struct *[2] | cached_stacks
    struct timer_base [] | timer_bases
    struct hrtimer_cpu_base | hrtimer_bases
    struct exception_stacks | exception_stacks
    struct page * | huge_zero_page
    struct folio * | huge_zero_folio
    struct cpumask | __cpu_online_mask
    struct cpumask | __cpu_possible_mask
    struct cpumask | __cpu_present_mask
    unsigned long | __highest_present_section_nr
    unsigned long [] | __per_cpu_offset
    atomic_long_t | _totalram_pages
    const struct pipe_buf_operations | anon_pipe_buf_ops
    struct neigh_table | arp_tbl
    unsigned long [3] | avenrun
    const struct class | block_class
    struct super_block * | blockdev_superblock
    struct idr | btf_idr
    struct kset * | bus_kset
    const struct kobj_type | bus_ktype
    struct kobj_map * | cdev_map
    struct cgroup_root | cgrp_dfl_root
    struct char_device_struct *[255] | chrdevs
    struct kset * | class_kset
    const struct kobj_type | class_ktype
    note_buf_t * | crash_notes
    int | crashing_cpu
    const struct kobj_type | device_ktype
    const struct kobj_type | driver_ktype
    const struct trace_print_flags [] | gfpflag_names
    struct hstate [] | hstates
    int | hugetlb_max_hstate
    gate_desc [256] | idt_table
    struct fs_struct | init_fs
    struct ipc_namespace | init_ipc_ns
    struct mm_struct | init_mm
    struct net | init_net
    struct pid_namespace | init_pid_ns
    struct task_struct | init_task
    struct time_namespace | init_time_ns
    struct uts_namespace | init_uts_ns
    struct resource | ioport_resource
    int | ipc_mni_shift
    struct xarray | irq_desc_tree
    u64 | jiffies_64
    unsigned long | ksm_pages_shared
    struct idr | link_idr
    const char [] | linux_banner
    char * | log_buf
    struct blk_major_name *[255] | major_names
    struct idr | map_idr
    unsigned long | max_low_pfn
    unsigned long | max_pfn
    struct mem_section ** | mem_section
    struct memblock | memblock
    const struct bus_type | memory_subsys
    unsigned long | min_low_pfn
    struct mod_tree_root | mod_tree
    const struct kobj_type | module_ktype
    struct list_head | modules
    struct list_head | net_namespace_list
    struct pglist_data *[] | node_data
    nodemask_t [NR_NODE_STATES] | node_states
    unsigned int | nr_cpu_ids
    int | nr_irqs
    unsigned int | nr_node_ids
    atomic_long_t | nr_swap_pages
    unsigned int | nr_swapfiles
    unsigned int [] | nr_swapper_spaces
    atomic_long_t | nr_vmalloc_pages
    unsigned int | nr_vmap_nodes
    const struct file_operations | ns_file_operations
    atomic_long_t | num_poisoned_pages
    unsigned long | page_offset_base
    atomic_t | panic_cpu
    const struct bus_type | pci_bus_type
    struct list_head | pci_root_buses
    void * | pcpu_base_addr
    struct list_head * | pcpu_chunk_lists
    struct pcpu_chunk * | pcpu_first_chunk
    unsigned long | pcpu_nr_populated
    int | pcpu_nr_slots
    int | pcpu_nr_units
    const unsigned long * | pcpu_unit_offsets
    int | pcpu_unit_pages
    struct list_head | pgd_list
    struct timer_list | poll_spurious_irq_timer
    struct printk_ringbuffer * | prb
    struct idr | prog_idr
    struct task_group | root_task_group
    int | sections_per_block
    struct list_head | slab_caches
    struct kset * | slab_kset
    struct softirq_action [NR_SOFTIRQS] | softirq_vec
    struct maple_tree | sparse_irqs
    void *[] | stack_pools
    void *[] | stack_slabs
    struct swap_info_struct *[] | swap_info
    struct address_space *[] | swapper_spaces
    unsigned long | sysctl_overcommit_kbytes
    int | sysctl_overcommit_ratio
    struct kernfs_node * | sysfs_root_kn
    const struct taint_flag [] | taint_flags
    unsigned long | tainted_mask
    const char * const [9] | task_state_array
    struct kmem_cache * | task_struct_cachep
    long | total_swap_pages
    struct hlist_head [] | uidhash_table
    const char [] | vermagic
    struct percpu_counter | vm_committed_as
    atomic_long_t [NR_VM_NODE_STAT_ITEMS] | vm_node_stat
    atomic_long_t [NR_VM_NUMA_EVENT_ITEMS] | vm_numa_event
    atomic_long_t [NR_VM_NUMA_STAT_ITEMS] | vm_numa_stat
    atomic_long_t [NR_VM_ZONE_STAT_ITEMS] | vm_zone_stat
    struct list_head | vmap_area_list
    struct rb_root | vmap_area_root
    struct vmap_node * | vmap_nodes
    unsigned int | vmap_zone_size
    unsigned long | vmemmap_base
    """
)
