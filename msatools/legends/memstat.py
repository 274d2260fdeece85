# SPDX-License-Identifier: LGPL-2.1-or-later

"""The legend of msa-memstat."""

from msatools.legends.model import Entry, Group, Legend

COLUMNS = Group(
    "Columns",
    "column",
    (
        Entry("CLASS", "what the pages are used for; each page is in one class"),
        Entry("PAGES", "number of pages"),
        Entry("CHANGE", "pages more or less than at the interval's start"),
        Entry("SIZE", "the same in bytes"),
        Entry("%RAM", "share of the memory that the allocator manages"),
        Entry(
            "KERNEL SAYS",
            "the kernel's own counter that the class is compared with",
            "From vm_stat, vmstat's per-CPU parts and the like.",
        ),
        Entry(
            "DIFF",
            "pages found less the kernel's counter, and the reason",
            "A reason was itself counted, such as stacks that CPUs keep for the next "
            "fork.",
        ),
    ),
    where="header",
)

DIFFS = Group(
    "Results of a check",
    "result of a check",
    (
        Entry("ok", "the scan and the kernel's counter agree to the page"),
        Entry(
            "UNEXPLAINED",
            "they differ, and nothing explains it: do not trust this row",
            "One of the two is wrong: the kernel miscounts, pages changed during the "
            "scan, or a driver's pages look like the class.",
        ),
        Entry(
            "(torn)",
            "they differ, and the file was written while the guest ran",
            "Its pages and its counters are of different moments, as other structures "
            "in it show: the counter and the row can both be right, each for its own.",
        ),
        Entry("- (lost)", "the kernel's counter could not be read"),
    ),
    ("DIFF",),
    where="word",
)

CLASSES = Group(
    "Classes",
    "class of pages",
    (
        Entry("buddy", "free, in the buddy allocator", "PG_buddy.", key="free.buddy"),
        Entry(
            "per-CPU lists",
            "free, on the lists of CPUs",
            "/proc/meminfo does not have them.",
            key="free.pcp",
        ),
        Entry("hugetlb pool", "reserved for hugetlb, not in use", key="free.hugetlb"),
        Entry(
            "unaccepted",
            "memory that a confidential guest has not accepted yet",
            key="free.unaccepted",
        ),
        Entry(
            "anon",
            "memory of processes, with its swap cache",
            "page->mapping is an anon_vma.",
            key="user.anon",
        ),
        Entry("KSM", "pages that KSM shares, once each", key="user.ksm"),
        Entry("hugetlb", "huge pages of hugetlb in use", key="user.hugetlb"),
        Entry(
            "file",
            "page cache of files",
            "page->mapping is an inode's.",
            key="cache.file",
        ),
        Entry(
            "exec and libs",
            "page cache of files that a process maps to execute",
            "All pages of the file.",
            key="cache.exec",
        ),
        Entry(
            "shmem",
            "tmpfs, memfd, shared anonymous and System V memory",
            "With its swap cache.",
            key="cache.shmem",
        ),
        Entry(
            "block devices",
            "page cache of block devices",
            "Metadata of file systems, and raw reads.",
            key="cache.blockdev",
        ),
        Entry("slab", "small objects of the kernel", "PG_slab.", key="kernel.slab"),
        Entry(
            "large kmalloc",
            "kmalloc() of more than two pages",
            "A driver's own compound pages may look the same.",
            key="kernel.large_kmalloc",
        ),
        Entry(
            "page tables",
            "page tables of processes",
            "Those that NR_PAGETABLE counts.",
            key="kernel.page_tables",
        ),
        Entry(
            "kernel's tables",
            "the kernel's page tables, and processes' top levels",
            "NR_PAGETABLE does not count them.",
            key="kernel.page_tables_own",
        ),
        Entry(
            "stacks",
            "kernel stacks of threads",
            "With those that CPUs keep for the next fork.",
            key="kernel.stacks",
        ),
        Entry(
            "vmalloc",
            "vmalloc(), without stacks",
            "-v lists callers.",
            key="kernel.vmalloc",
        ),
        Entry(
            "percpu",
            "per-CPU variables",
            "Not those in boot memory.",
            key="kernel.percpu",
        ),
        Entry("pipe buffers", "data in pipes", "In no counter.", key="kernel.pipes"),
        Entry(
            "socket buffers",
            "data queued in sockets, as page fragments",
            "In no counter.",
            key="kernel.sockets",
        ),
        Entry(
            "mapped pages (vmap)",
            "pages that drivers and BPF map with vmap()",
            "NR_VMALLOC does not count them.",
            key="kernel.vmap",
        ),
        Entry(
            "rings (perf, io_uring, packets)",
            "buffers that the kernel shares with programs",
            "In no counter.",
            key="kernel.rings",
        ),
        Entry(
            "requests of disks",
            "requests that block devices keep for their I/O",
            "In no counter.",
            key="kernel.requests",
        ),
        Entry(
            "queues of devices",
            "what NVMe and virtio devices read and write, DMA pools",
            "In no counter.",
            key="kernel.dma",
        ),
        Entry(
            "dma-bufs",
            "buffers of a DMA heap that programs and devices share",
            "In no counter; --by dmabuf lists all dma-bufs.",
            key="kernel.dmabuf",
        ),
        Entry(
            "memory pools",
            "reserves (mempool)",
            "In no counter.",
            key="kernel.mempools",
        ),
        Entry(
            "tracing",
            "buffers and records of ftrace",
            "In no counter.",
            key="kernel.tracing",
        ),
        Entry(
            "hash tables",
            "made at boot; and single pages that variables point to",
            "In no counter.",
            key="kernel.globals",
        ),
        Entry(
            "memmap, hot-plugged",
            "struct pages of memory that was plugged in",
            "Those of boot memory are reserved.",
            key="kernel.memmap",
        ),
        Entry("huge zero page", "the huge page of zeros", key="kernel.huge_zero"),
        Entry("zsmalloc", "compressed pages: zswap, zram", key="kernel.zsmalloc"),
        Entry("movable", "other movable pages of drivers", key="kernel.movable"),
        Entry(
            "unattributed",
            "in use, owner unknown: usually a driver's own pages",
            "--unattributed lists them with what they point to.",
            key="kernel.unattributed",
        ),
        Entry("Managed", "all pages given to the allocator", "totalram_pages."),
        Entry(
            "Reserved",
            "kernel image, memmap, firmware, holes",
            "PG_reserved.",
            key="reserved",
        ),
        Entry(
            "Balloon",
            "given back to the hypervisor",
            "PageOffline.",
            key="offline",
        ),
        Entry(
            "Hardware-poisoned", "taken out of use after memory errors", key="hwpoison"
        ),
        Entry("Device memory", "memory of devices, with struct pages", key="device"),
        Entry(
            "Not in the dump",
            "their struct page was left out of the dump",
            key="excluded",
        ),
        Entry("Unreadable", "their struct page could not be read", key="unreadable"),
        Entry("Total", "all pages with a struct page"),
        Entry("Physical", "memory of the machine, without holes"),
        Entry("(in the swap cache)", "of anon and shmem: pages that are on swap, too"),
        Entry("(on swap)", "pages on swap devices, not in memory"),
    ),
    ("CLASS",),
)

VIEWS = Group(
    "Columns of --by",
    "column of --by",
    (
        Entry("CLASSES", "the classes with most of its pages"),
        Entry("DYING", "removed control group that its memory keeps alive"),
        Entry("SWAP", "on swap, of this owner"),
        Entry("SLAB", "objects in slabs that the group is charged for; - if removed"),
        Entry("PERCPU", "per-CPU memory that the group is charged for; - if removed"),
        Entry("RSS", "as Rss of /proc/PID/smaps_rollup, without hugetlb"),
        Entry("PSS", "as Pss: shared pages divided among those who map them"),
        Entry("ANON", "as Anonymous"),
        Entry("PRIVATE", "pages that no other process maps"),
        Entry("HUGETLB", "huge pages of hugetlb that it maps"),
        Entry("PAGE TABLE", "its page tables, as VmPTE; not part of PAGES"),
        Entry("KIND", "kind of file: file, block device, tmpfs, memfd"),
        Entry("MOUNT", "mount point of its file system"),
        Entry("FSTYPE", "type of the file system"),
        Entry("DEVICE", "its block device"),
        Entry("FILES", "files with cached pages"),
        Entry("SLABS", "slabs of the cache, full ones too"),
        Entry("OBJECTS", "objects that they have room for"),
        Entry("OBJECTS IN USE", "allocated objects"),
        Entry("BYTES EACH", "size of an object"),
        Entry("MERGED", "other caches that share these slabs"),
        Entry("MODULE", "module that most of a sample of the objects point into"),
        Entry("AREAS", "areas of vmalloc"),
    ),
    where="header",
)

LISTS = Group(
    "Columns of --unattributed, --leaks, --frag and --sections",
    "column",
    (
        Entry("ORDER", "size of the blocks: two to this power pages"),
        Entry("BLOCKS", "number of blocks, as they were allocated"),
        Entry("RUNS", "runs of neighbouring blocks"),
        Entry("NODE", "NUMA node"),
        Entry("REFS", "references to the page"),
        Entry("PFN", "page frame number of the first"),
        Entry("CONTENTS", "what the contents look like"),
        Entry("MOST FREQUENT WORDS", "symbols and caches that the contents point to"),
        Entry("WHAT", "slab cache, vmalloc area or pages"),
        Entry("SURE", "how well it is known whose they are"),
        Entry("FRAGMENTATION", "free memory that is in blocks too small to be of use"),
        Entry("MOVABLE", "pages that the kernel can move"),
        Entry("UNMOVABLE", "pages that it cannot move"),
        Entry("FREE PAGES", "free pages in these blocks"),
        Entry("BLOCKS WITH UNMOVABLE", "blocks with a page that cannot be moved"),
        Entry("WITH BOTH", "blocks with pages of both kinds"),
        Entry("ALONE", "blocks that only this class keeps from being free"),
        Entry("PFNS", "page frame numbers of the section"),
        Entry("ZONES", "zones that the section is in"),
        Entry("FIRST STRUCT PAGE", "address of its first struct page"),
        Entry("LAST STRUCT PAGE", "address of its last struct page"),
        Entry("STATE", "state of the section; early: there since boot"),
    ),
    where="header",
)

LEGEND: Legend = (COLUMNS, DIFFS, CLASSES, VIEWS, LISTS)
