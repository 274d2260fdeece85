# SPDX-License-Identifier: LGPL-2.1-or-later

"""What /proc/vmstat of a running kernel counts, and memstat counts as well."""

COUNTED = {
    "free": (("free.buddy", "free.pcp"), ("nr_free_pages", "pcp")),
    "anon": (("user.anon", "user.ksm"), ("nr_anon_pages",)),
    "cache": (
        ("cache.file", "cache.exec", "cache.shmem", "cache.blockdev"),
        ("nr_file_pages",),
    ),
    "shmem": (("cache.shmem",), ("nr_shmem",)),
    "slab": (
        ("kernel.slab", "kernel.large_kmalloc"),
        ("nr_slab_reclaimable", "nr_slab_unreclaimable"),
    ),
    "page tables": (("kernel.page_tables",), ("nr_page_table_pages",)),
    "stacks": (("kernel.stacks",), ("nr_kernel_stack",)),
}
"""Classes, and what the kernel calls their pages. Pages go from the buddy allocator to
per-CPU lists and back by the hundred, without being used in between."""

HUGE_PAGES = 512
"""In one that khugepaged makes."""

CACHED_STACKS = 2 * 2 * 4
"""Two of four pages for each of two CPUs are kept for the next threads, and in no
counter."""
