# SPDX-License-Identifier: LGPL-2.1-or-later

"""Kinds of losses of a report, and whether they make it incomplete.

Each loss is counted in the report's coverage under its key, and noted if it has a text.
``--strict`` uses the same keys, so that no loss is silent.
"""

from enum import Enum


class Loss(str, Enum):
    """A kind of loss; its value is its key in the coverage of reports."""

    # Of the dump's file.
    PAGE_DESCRIPTORS = "descriptors_bad"
    TORN = "torn"

    # Of the kernel itself, and of all commands.
    ACCOUNTING = "accounting_unreadable"
    CLOCKS = "clocks_unreadable"
    COMMAND_LINE = "command_line_unreadable"
    COUNTERS = "counters_unreadable"
    COUNTS = "counts_broken"
    CPUS = "cpus_unreadable"
    LISTS = "lists_broken"
    LOAD = "load_unreadable"
    LOG = "log_unreadable"
    MASKS = "cpumasks_unreadable"
    MODULES = "modules_unreadable"
    NAMES = "names_unreadable"
    NODES = "nodes_unreadable"
    PARTS = "parts_lost"
    SYMBOLS = "symbols_unreadable"
    TREES = "trees_broken"
    TYPES = "types_unreadable"
    UNWINDING = "unwind_tables_unreadable"

    # Of tasks.
    CGROUP_NAMES = "cgroup_names_unreadable"
    CGROUP_PATHS = "cgroup_paths_unreadable"
    DESCRIPTORS = "file_tables_unreadable"
    FILES = "files_unreadable"
    PATHS = "paths_unreadable"
    PIDS = "pids_unreadable"
    SIZES = "sizes_unreadable"
    STACKS = "stacks_unreadable"
    STACKS_CUT = "stacks_incomplete"
    TASKS = "tasks_unreadable"
    WAITS = "waits_unreadable"

    # Of locks and who waits.
    COMPLETIONS = "completions_unreadable"
    DEVICES = "devices_unreadable"
    DISKS = "disks_unreadable"
    FILE_SYSTEMS = "file_systems_unreadable"
    FUTEX_CHAINS = "futex_chains_broken"
    FUTEX_OWNERS = "futex_owners_unreadable"
    KERNEL_THREADS = "kernel_threads_unreadable"
    LOCKS = "locks_unreadable"
    LOCK_NAMES = "lock_names_unreadable"
    MAPPINGS = "mappings_unreadable"
    SERVERS = "servers_unreadable"
    USER_STACKS = "user_stacks_unreadable"
    WAITERS = "waiters_unreadable"
    WORKQUEUES = "workqueues_unreadable"

    # Of the dead and what holds them.
    HEIRS = "heirs_unreadable"
    HOLDERS = "holders_unreadable"
    LEAKS = "leaks_lost"
    LIMITS = "limits_unreadable"
    PARENTS_LOCKS = "locks_lost"
    SLABS = "slabs_unreadable"
    VARIABLES = "variables_unreadable"

    # Of CPUs.
    AFFINITIES = "affinities_unreadable"
    DOMAINS = "root_domains_unreadable"
    HANDLERS = "handlers_broken"
    HOTPLUG = "hotplug_unreadable"
    IDLE_STATES = "idle_states_unreadable"
    IRQS = "irqs_unreadable"
    IRQ_AFFINITY = "irq_affinity_unreadable"
    IRQ_COUNTS = "irq_counts_unreadable"
    IRQ_DESCRIPTORS = "irq_desc_broken"
    PARTITIONS = "partitions_unknown"
    QUEUED = "queues_broken"
    QUEUES_DIFFER = "run_queues_differ"
    RUN_QUEUES = "run_queues_unreadable"
    TICKS = "ticks_unreadable"
    TOPOLOGY = "topology_unreadable"

    # Of memory.
    ADDRESS_SPACES = "address_spaces_lost"
    EXCLUDED = "excluded_pages"
    DMA = "dma_pages_lost"
    DMABUFS = "dmabufs_unreadable"
    FTRACE = "ftrace_pages_lost"
    GLOBALS = "tables_pages_lost"
    HEADS = "heads_unreadable"
    INODES = "inodes_unreadable"
    OWNERS = "owners_unreadable"
    PAGE_BLOCKS = "pageblocks_unreadable"
    MEMPOOLS = "mempools_unreadable"
    PAGE_OWNER = "page_owner_unreadable"
    PAGE_TABLES = "page_tables_unreadable"
    PAGES = "unreadable_pages"
    PCP_LISTS = "pcp_lists_unreadable"
    PCP_LISTS_CUT = "pcp_lists_broken"
    PIPES = "pipes_unreadable"
    REQUESTS = "requests_pages_lost"
    RINGS = "rings_unreadable"
    SECTION_TABLE = "section_table_lost"
    SLAB_CACHES = "slab_caches_unreadable"
    SOCKETS = "sockets_unreadable"
    SOCKET_BUFFERS = "skbs_unreadable"
    USER_TABLES = "user_tables_unreadable"
    USER_TABLE_ENTRIES = "user_table_entries_broken"
    VMALLOC = "vmalloc_areas_unreadable"
    VMSTAT_CPUS = "vmstat_cpus_unreadable"


_STEADY = frozenset(
    {
        Loss.ACCOUNTING,
        Loss.CLOCKS,
        Loss.COMMAND_LINE,
        Loss.COUNTERS,
        Loss.CPUS,
        Loss.EXCLUDED,
        Loss.HEADS,
        Loss.HOTPLUG,
        Loss.IDLE_STATES,
        Loss.LIMITS,
        Loss.LISTS,
        Loss.LOAD,
        Loss.LOG,
        Loss.MASKS,
        Loss.MODULES,
        Loss.NODES,
        Loss.OWNERS,
        Loss.PAGES,
        Loss.PAGE_BLOCKS,
        Loss.PAGE_TABLES,
        Loss.PARTS,
        Loss.PCP_LISTS,
        Loss.RUN_QUEUES,
        Loss.SECTION_TABLE,
        Loss.SYMBOLS,
        Loss.TASKS,
        Loss.TICKS,
        Loss.TOPOLOGY,
        Loss.TYPES,
        Loss.UNWINDING,
        Loss.VARIABLES,
        Loss.VMALLOC,
        Loss.VMSTAT_CPUS,
    }
)
"""Losses that make a report of a running kernel incomplete, too. The others concern
tasks, files and pages, which may go away while they are read: that is not a loss."""

_STRUCT = "struct "
_UNREADABLE = "_unreadable"
_KEYS = frozenset(loss.value for loss in Loss)
_STEADY_KEYS = frozenset(loss.value for loss in _STEADY)


def struct_key(type_name: str) -> str:
    """Return the key for unreadable structures, such as ``cred_unreadable``."""
    return type_name.removeprefix(_STRUCT).replace(" ", "_") + _UNREADABLE


def is_loss(key: str) -> bool:
    """Return whether a key of a report's coverage counts losses."""
    return key in _KEYS or key.endswith(_UNREADABLE)


def spoils(key: str, live: bool) -> bool:
    """Return whether losses with this key make a report incomplete.

    :param live: Whether the report is of a running kernel.
    """
    return key in _STEADY_KEYS if live else is_loss(key)
