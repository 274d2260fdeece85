# SPDX-License-Identifier: LGPL-2.1-or-later

"""Lacks of memory in the kernel's log."""

from msgspec.structs import replace

from msatools.report.memory import parse_ooms, victims
from tests.report.test_events import log

PAGE = 4096
CGROUP = """\
my eater invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
memory: usage 65536kB, limit 65536kB, failcnt 37
Memory cgroup stats for /service/a b:
Tasks state (memory values in pages):
[  pid  ]   uid  tgid total_vm      rss rss_anon rss_file rss_shmem pgtables_bytes \
swapents oom_score_adj name
[    175]     0   175    23000    20151    19098     1053         0   208896        0 \
            0 my eater
[    176]     0   176     2300      151       98       53         0    20896        0 \
         -999 12
oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,\
oom_memcg=/service/a b,task_memcg=/service/a b,task=my eater,pid=175,uid=0
Memory cgroup out of memory: Killed process 175 (my eater) total-vm:92000kB, \
anon-rss:76392kB, file-rss:4212kB, shmem-rss:0kB, UID:0 pgtables:204kB oom_score_adj:0
"""
GLOBAL_51 = """\
a invoked oom-killer: gfp_mask=0x140dca(GFP_HIGHUSER_MOVABLE|__GFP_ZERO), order=-1, \
oom_score_adj=0
[    300]     0   300    23000    20151   208896        0             0 big
oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,\
task_memcg=/,task=big,pid=300,uid=0
Out of memory: Killed process 300 (big) total-vm:92000kB, anon-rss:76392kB
"""


def test_of_a_control_group() -> None:
    (oom,) = parse_ooms(log(CGROUP), PAGE)
    assert (oom.comm, oom.order, oom.flags) == ("my eater", 0, "GFP_KERNEL")
    assert (oom.constraint, oom.cgroup) == ("cgroup", "/service/a b")
    assert [(each.pid, each.comm, each.rss_pages) for each in oom.holders] == [
        (175, "my eater", 20151),
        (176, "12", 151),
    ]
    (victim,) = oom.victims
    assert (victim.pid, victim.comm, victim.time_ns) == (175, "my eater", 8)
    assert victim.anon_bytes == 76392 << 10


def test_of_the_machine() -> None:
    """The table of tasks has fewer columns up to v6.9."""
    first, second = parse_ooms(log(CGROUP + GLOBAL_51), PAGE)
    assert first.constraint == "cgroup"
    assert (second.constraint, second.cgroup, second.order) == ("none", None, -1)
    assert [(each.pid, each.comm) for each in second.holders] == [(300, "big")]
    assert [each.pid for each in victims([first, second])] == [175, 300]


def test_whose_beginning_is_lost() -> None:
    """The table of thousands of tasks is larger than the log."""
    lines = GLOBAL_51.splitlines()
    (oom,) = parse_ooms(log("\n".join(lines[2:])), PAGE)
    assert (oom.comm, oom.order, oom.constraint) == (None, None, "none")
    assert [each.pid for each in oom.victims] == [300]


def test_of_a_group_that_is_killed_as_a_whole() -> None:
    killed = "Memory cgroup out of memory: Killed process 176 (12) total-vm:1kB\n"
    (oom,) = parse_ooms(log(CGROUP + killed), PAGE)
    assert [each.pid for each in oom.victims] == [175, 176]


def test_of_a_program_that_writes_to_the_log() -> None:
    """A program may write any line to /dev/kmsg, but not as the kernel."""
    lines = [replace(each, facility=1) for each in log(CGROUP)]
    assert parse_ooms(lines, PAGE) == []


GROUP_STAT = """\
a invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
memory: usage 65536kB, limit 65536kB, failcnt 37
Memory cgroup stats for /service:
anon 4194304
file 60000000
shmem 58720256
slab 1048576
slab_reclaimable 1000000
pagetables 8192
Tasks state (memory values in pages):
anon 1
"""


def test_what_a_control_group_was_full_of() -> None:
    (oom,) = parse_ooms(log(GROUP_STAT), PAGE)
    assert dict(oom.filled) == {
        "tmpfs and shared memory": 58720256,
        "anonymous": 4194304,
        "page cache": 60000000 - 58720256,
        "slab": 1048576,
        "page tables": 8192,
    }
    assert next(iter(oom.filled)) == "tmpfs and shared memory"
    # As one record of several lines, as some kernels write it.
    head, _, rest = GROUP_STAT.partition("anon")
    whole = log(head + "anon")
    whole[-1] = replace(whole[-1], text="anon" + rest)
    assert parse_ooms(whole, PAGE)[0].filled == oom.filled


MACHINE = """\
a invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
Mem-Info:
active_anon:1000 inactive_anon:0 isolated_anon:0
Node 0 active_anon:4000kB inactive_anon:0kB shmem:0kB kernel_stack:40kB
2000 pages RAM
100 pages reserved
"""
FAILED = """\
b: page allocation failure: order:4, mode:0xcc0(GFP_KERNEL)
Mem-Info:
active_anon:5 inactive_anon:0 isolated_anon:0 active_file:7000
"""


def test_what_the_machine_was_full_of() -> None:
    """Not what a later line says, of memory that could not be had at once."""
    killed = "Out of memory: Killed process 300 (big) total-vm:1kB\n"
    (oom,) = parse_ooms(log(MACHINE + killed + FAILED), PAGE)
    assert dict(oom.filled) == {
        "anonymous": 1000 * PAGE,
        "in no counter (drivers, vmalloc)": 900 * PAGE - 40 * 1024,
        "kernel stacks": 40 * 1024,
    }
    (headless,) = parse_ooms(log(killed + FAILED), PAGE)
    assert not headless.filled


def test_groups_of_version_1() -> None:
    """Those below are in the totals alone."""
    stat = "rss 4096\ncache 0\nshmem 0\ntotal_rss 8192\ntotal_cache 4096\n"
    text = GROUP_STAT.partition("anon")[0] + stat
    (oom,) = parse_ooms(log(text), PAGE)
    assert dict(oom.filled) == {"anonymous": 8192, "page cache": 4096}
