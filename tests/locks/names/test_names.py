# SPDX-License-Identifier: LGPL-2.1-or-later

"""What locks are called, and what they lie in."""

import stat
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import get_args

import drgn
import pytest
from drgn.helpers.linux.block import disk_name, for_each_disk
from drgn.helpers.linux.fs import d_path, for_each_file, for_each_mount, mount_dst
from drgn.helpers.linux.mm import for_each_vma
from drgn.helpers.linux.module import find_module
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import find_task, for_each_task
from drgn.helpers.linux.slab import slab_object_info

from msatools.kernel.report import LossLog
from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Lock, LockTypeName
from msatools.locks.events import bitwaits, folios, waitqueues
from msatools.locks.names.described import process_of
from msatools.locks.names.names import LockNames, Name
from msatools.locks.places.places import lock_places
from msatools.locks.places.slabs import Slabs
from msatools.locks.places.variables import Variables
from msatools.locks.user.filelocks import request as file_lock_request
from msatools.locks.user.userlocks import requests as futex_requests
from msatools.selfdesc.finders import finders_of
from tests.locks.seen import TASKS, Asked, Seen, Truth, damaged, seen
from tests.support.overlay import lose_page

MAX_READS = 24
"""That a lock's name may take, on the average; the memory map alone takes three."""


class Dump:
    """The locks that tasks of one dump wait for."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.prog = seen.prog
        self.context = seen.context()
        self.losses = self.context.losses
        self.names = LockNames(self.context)

    def lock(self, name: str) -> Lock:
        """The lock of the kernel that a task waits for."""
        on = self.seen.on(name)
        assert on.address is not None
        return Lock(on.type, int(on.address))  # type: ignore[arg-type]

    def case(self, of: str | int) -> BlockedTask:
        return self.seen.case(of, self.context)

    def name(self, name: str) -> Name:
        return self.names.name(self.lock(name), [self.case(name)])

    def name_of(self, name: str, asked: Asked) -> Name:
        """Name what a task is asked to wait for."""
        case = self.case(name)
        request = asked(self.context, case)
        assert request is not None
        return self.names.name(request.lock, [case])

    def member(
        self, type_: LockTypeName, address: int, type_name: str, member: str
    ) -> Name:
        """Name what would be a lock in a structure."""
        place = address + self.context.layout.offset(type_name, member)
        return self.names.name(Lock(type_, place), [])

    def truth(self, name: str) -> Truth:
        on: Truth = self.seen.named[name]["on"]
        return on


@lru_cache(maxsize=2)
def dump_of(seen: Seen) -> Dump:
    return Dump(seen)


@pytest.fixture
def dump(tasks: Seen) -> Iterator[Dump]:
    dump = dump_of(tasks)
    yield dump
    assert not dump.losses.lost


# --- locks of the kernel that tasks wait for


def test_locks_of_a_directory(dump: Dump) -> None:
    inode = dump.truth("directory-make")["inode"]
    for name in ("directory-make", "directory-rename", "directory-read"):
        told = dump.name(name)
        assert told.name == "i_rwsem of /mnt/slow/busy"
        assert told.path == "/mnt/slow/busy"
        assert told.inode == inode
        assert told.cache == "ext4_inode_cache"
        lookup = dump.truth("directory-lookup")
        assert told.device == f"{lookup['name']} {lookup['device']}"


def test_a_file_system_is_called_by_its_root(dump: Dump) -> None:
    told = dump.name("rename-mutex")
    assert (told.name, told.path) == ("s_vfs_rename_mutex of /mnt/slow", "/mnt/slow")


def test_locks_of_an_address_space(dump: Dump) -> None:
    pid = dump.truth("unmap")["mm_of"]
    told = dump.name("cmdline-read")
    assert told == Name(
        name=f"mm_struct({pid} unmap).mmap_lock", pid=pid, cache="mm_struct"
    )
    told = dump.name("unmap")
    # Where each mapping has a lock of its own (6.4 and newer), it waits for that.
    if dump.context.layout.has("vma_lock", "lock"):
        assert told.name == f"vm_area_struct({pid} unmap).vm_lock"
        assert told.cache == "vma_lock"
    else:
        assert told.name == f"mm_struct({pid} unmap).mmap_lock"
    assert told.pid == pid


def test_a_pipe(dump: Dump) -> None:
    """Only who waits tells which it is."""
    inode = dump.truth("pipe-mutex")["inode"]
    lock = dump.lock("pipe-mutex")
    told = dump.names.name(lock, [dump.case("pipe-mutex")])
    assert (told.name, told.inode) == (f"pipe:[{inode}]", inode)
    alone = LockNames(dump.context).name(lock, [])
    offset = dump.context.layout.offset("pipe_inode_info", "mutex")
    assert alone == Name(name=f"{told.cache}+{offset:#x}", cache=told.cache)
    assert "kmalloc" in str(told.cache)


# --- data, bits and queues


def test_pages_of_files(dump: Dump) -> None:
    for name, path in (
        ("file-read", "/mnt/slow/read"),
        ("fault-data", "/mnt/slow/fault-data"),
        ("fault-text", "/mnt/slow/fault-text"),
    ):
        on = dump.truth(name)
        assert dump.name_of(name, folios.request) == Name(
            name=f"folio 0 of {path}",
            path=path,
            inode=on["inode"],
            device=f"{on['name']} {on['device']}",
        )


def test_pages_of_a_device_and_of_swap(dump: Dump) -> None:
    on = dump.truth("disk-fsync")
    # It has written at 12 MiB.
    assert dump.name_of("disk-fsync", folios.request) == Name(
        name=f"folio 3072 of {on['name']}", device=f"{on['name']} {on['device']}"
    )
    on = dump.truth("swap-in")
    if not dump.seen.is_as_said("swap-in"):
        return
    told = dump.name_of("swap-in", folios.request)
    assert told.pid == dump.seen.named["swap-in"]["pid"]
    assert told.name == f"anon folio of {told.pid}"
    assert told.device == f"{on['name']} {on['device']}"


def test_a_buffer(dump: Dump) -> None:
    on = dump.truth("directory-lookup")
    request = bitwaits.request(dump.context, dump.case("directory-lookup"))
    assert request is not None
    head = drgn.Object(
        dump.prog, "struct buffer_head", address=request.lock.address or 0
    )
    assert dump.name_of("directory-lookup", bitwaits.request) == Name(
        name=f"buffer {head.b_blocknr.value_()} of {on['name']}",
        device=f"{on['name']} {on['device']}",
        cache="buffer_head",
    )


def test_the_state_of_an_inode(dump: Dump) -> None:
    """The word's own address, or that of one of its bytes."""
    inode = dump.truth("directory-make")["inode"]
    lock = dump.lock("directory-make")
    at = dump.context.layout.offset
    start = int(lock.address or 0) - at("inode", "i_rwsem") + at("inode", "i_state")
    for byte in (0, 3):
        told = dump.names.name(Lock("bit_wait", start + byte, 7), [])
        assert (told.name, told.inode) == ("i_state of /mnt/slow/busy", inode)


def test_a_journal(dump: Dump) -> None:
    told, on = dump.name_of("file-fsync", waitqueues.request), dump.truth("file-read")
    assert told.name == f"j_wait_done_commit of {on['name']}"
    assert told.device == f"{on['name']} {on['device']}"


def test_locks_on_files(dump: Dump) -> None:
    for name in ("flock", "posix-lock", "ofd-lock"):
        told = dump.name_of(name, file_lock_request)
        assert told.name == told.path == f"/run/{name}"
        assert told.inode == dump.truth(name)["inode"]


def test_on_a_stack(dump: Dump) -> None:
    for task in list(for_each_task(dump.prog))[::200]:
        if not task.stack:
            continue
        pid = task.pid.value_()
        told = dump.names.name(Lock("completion", task.stack.value_() + 8192), [])
        assert told == Name(name=f"on the stack of {pid}", pid=pid)


# --- futexes


def test_futexes_in_memory(dump: Dump) -> None:
    for server in dump.seen.run.workload["servers"].values():
        tid = server["workers"][0]
        case = dump.case(tid)
        (request,) = futex_requests(dump.context, case)
        told = dump.names.name(request.lock, [case])
        assert told.pid == dump.seen.table["tgid"][case.row]
        assert told.path == "/lab/server"
        mm = find_task(dump.prog, tid).mm
        address = request.lock.address or 0
        place = f"/lab/server+{offset_in_file(mm, address):#x}"
        assert told.name == f"condition variable in {place}"


def offset_in_file(mm: drgn.Object, address: int) -> int:
    """By a walk of the address space that does not ask our code."""
    for vma in for_each_vma(mm):
        if vma.vm_start <= address < vma.vm_end:
            start = vma.vm_pgoff.value_() * 4096
            return int(start + address - vma.vm_start.value_())
    raise LookupError(address)


def test_futexes_on_heap_and_stack(dump: Dump) -> None:
    case = dump.case("futex-wait")
    mm = find_task(dump.prog, int(dump.seen.table["pid"][case.row])).mm
    (request,) = futex_requests(dump.context, case)
    pid = int(dump.seen.table["tgid"][case.row])
    assert isinstance(request.lock.key, tuple)
    for address, name in (
        (mm.start_brk.value_(), "[heap]"),
        (mm.start_stack.value_(), "[stack]"),
    ):
        word, offset = address & -4096, address & 4095
        key = request.lock.key._replace(word=word, offset=offset)
        lock = replace(request.lock, address=address, key=key)
        assert dump.names.name(lock, [case]) == Name(name=name, pid=pid)
    assert LockNames(dump.context).name(request.lock, []) == Name()


def test_futexes_in_shared_files(dump: Dump) -> None:
    case, on = dump.case("futex-shared"), dump.truth("futex-shared")
    (request,) = futex_requests(dump.context, case)
    told = dump.names.name(request.lock, [case])
    assert told.inode == on["inode"]
    assert told.path == "/dev/shm/futex"
    key = request.lock.key
    assert isinstance(key, tuple)
    assert told.name == f"/dev/shm/futex+{key.file_offset:#x}"


# --- what nobody waits for in these dumps: locks by where they are


def test_disks_and_their_queues(dump: Dump) -> None:
    compared = 0
    for disk in for_each_disk(dump.prog):
        address, name = disk.value_(), disk_name(disk).decode()
        told = dump.member("mutex", address, "gendisk", "open_mutex")
        assert told.name == f"open_mutex of {name}"
        assert (told.device or "").startswith(f"{name} ")
        queue = disk.queue.value_()
        told = dump.member("mutex", queue, "request_queue", "sysfs_lock")
        assert told.name == f"sysfs_lock of {name}"
        told = dump.member("wait_queue", queue, "request_queue", "mq_freeze_wq")
        assert told.name == f"mq_freeze_wq of {name}"
        part = disk.part0.value_()
        told = dump.member("mutex", part, "block_device", "bd_fsfreeze_mutex")
        assert told.name == f"bd_fsfreeze_mutex of {name}"
        bdi = disk.bdi.value_()
        told = dump.member("wait_queue", bdi, "backing_dev_info", "wb_waitq")
        number = f"{disk.major.value_()}:{disk.first_minor.value_()}"
        assert told.name == f"wb_waitq of {number}"
        compared += 1
    assert compared > 4


def test_every_mount(dump: Dump) -> None:
    compared = set()
    for mount in for_each_mount(dump.prog):
        super_block = mount.mnt.mnt_sb.value_()
        if super_block in compared:
            continue
        compared.add(super_block)
        told = dump.member("rwsem", super_block, "super_block", "s_umount")
        assert told.path == mount_dst(mount).decode()
        assert told.name == f"s_umount of {told.path}"
        inode = mount.mnt.mnt_root.d_inode
        told = dump.member("rwsem", inode.value_(), "inode", "i_data.invalidate_lock")
        assert told.name == f"invalidate_lock of {mount_dst(mount).decode()}"
        assert told.inode == inode.i_ino.value_()
    assert len(compared) > 6


def test_open_files(dump: Dump) -> None:
    paths = set()
    for name in ("file-read", "pipe-read", "disk-read", "tcp-accept", "flock"):
        task = find_task(dump.prog, dump.seen.named[name]["tid"])
        for _, file in for_each_file(task):
            if not file:
                continue
            address = file.value_()
            told = dump.member("mutex", address, "file", "f_pos_lock")
            assert told.inode in (file.f_inode.i_ino.value_(), None)
            inode = file.f_inode
            path = d_path(file.f_path).decode()
            for kind, test in (("pipe", stat.S_ISFIFO), ("socket", stat.S_ISSOCK)):
                if test(inode.i_mode.value_()):
                    path = f"{kind}:[{inode.i_ino.value_()}]"
            # What is deleted is marked as in /proc.
            name = (told.name or "").removesuffix(" (deleted)")
            assert name == f"f_pos_lock of {path}"
            paths.add(path)
    assert "/mnt/slow/busy" in paths
    assert any(path.startswith("pipe:[") for path in paths)
    assert any(path.startswith("socket:[") for path in paths)


def test_sockets(dump: Dump) -> None:
    for name in ("tcp-accept", "tcp-send", "unix-accept", "netlink-receive"):
        file = dump.case(name).file
        assert file is not None
        inode = dump.truth(name)["inode"]
        told = dump.member("wait_queue", file.private, "socket", "wq.wait")
        assert (told.name, told.inode) == (f"socket:[{inode}]", inode)
        sock = dump.context.layout.member(file.private, "socket", "sk")
        told = dump.member("wait_queue", sock, "sock", "sk_lock.wq")
        assert (told.name, told.inode) == (f"lock of socket:[{inode}]", inode)


def test_processes_and_their_memory(dump: Dump) -> None:
    compared = 0
    for task in list(for_each_task(dump.prog))[::50]:
        leader, pid = task.group_leader, task.tgid.value_()
        comm = leader.comm.string_().decode()
        signal = task.signal.value_()
        told = dump.member("mutex", signal, "signal_struct", "cred_guard_mutex")
        assert told.name == f"signal_struct({pid} {comm}).cred_guard_mutex"
        told = dump.member("rwsem", signal, "signal_struct", "exec_update_lock")
        assert (told.name, told.pid) == (
            f"signal_struct({pid} {comm}).exec_update_lock",
            pid,
        )
        compared += 1
    assert compared > 20


def test_anonymous_memory(dump: Dump) -> None:
    pid = dump.seen.named["futex-wait"]["pid"]
    task = find_task(dump.prog, pid)
    own = 0
    for vma in for_each_vma(task.mm):
        if not vma.anon_vma:
            continue
        told = dump.member("rwsem", vma.anon_vma.value_(), "anon_vma", "rwsem")
        assert told.name is not None
        # What it was made with it may share with who made it.
        own += told.name == f"anon_vma({pid} futex-wait).rwsem"
        assert told.cache == "anon_vma"
    assert own > 0


def test_terminals_and_trees(dump: Dump) -> None:
    file = dump.case("tty-read").file
    assert file is not None
    tty = drgn.Object(dump.prog, "struct tty_file_private *", value=file.private).tty
    told = dump.member("mutex", tty.value_(), "tty_struct", "atomic_write_lock")
    assert told.name == f"atomic_write_lock of {tty.name.string_().decode()}"
    (root,) = (
        mount.mnt.mnt_root
        for mount in for_each_mount(dump.prog)
        if mount_dst(mount) == b"/sys"
    )
    node = drgn.Object(
        dump.prog, "struct kernfs_node *", value=root.d_inode.i_private.value_()
    )
    told = dump.member("rwsem", node.dir.root.value_(), "kernfs_root", "kernfs_rwsem")
    assert told.name == "kernfs_rwsem of /sys"


def test_what_is_near_a_lock_is_none(dump: Dump) -> None:
    """One word off, an inode's lock is just a place in its cache."""
    lock = dump.lock("directory-make")
    near = Lock("rwsem", int(lock.address or 0) + 8)
    told = dump.names.name(near, [])
    assert str(told.name).startswith("ext4_inode_cache+0x")
    # Of what inode it is a part is known all the same.
    assert told.path == "/mnt/slow/busy"
    assert str(told.name).endswith(" of /mnt/slow/busy")
    mutex = Lock("mutex", int(lock.address or 0))
    assert "i_rwsem" not in str(dump.names.name(mutex, []).name)


# --- variables and slabs


def test_variables(dump: Dump) -> None:
    prog, layout = dump.prog, dump.context.layout
    variables = Variables(layout, LossLog())
    mutex = layout.symbol("cgroup_mutex")
    assert mutex is not None
    assert variables.name(mutex) == "cgroup_mutex"
    assert variables.name(mutex + 8) == "cgroup_mutex+0x8"
    for cpu in (0, 1):
        base = int(prog["__per_cpu_offset"][cpu]) + (layout.symbol("runqueues") or 0)
        assert variables.name(base) == f"runqueues of cpu{cpu}"
        assert variables.name(base + 16) == f"runqueues+0x10 of cpu{cpu}"
    # Functions are no variables, and small numbers no addresses.
    assert variables.name(layout.symbol("schedule") or 0) is None
    assert variables.name(layout.symbol("runqueues") or 0) is None
    assert variables.name(find_task(prog, 1).value_()) is None
    module = find_module(prog, b"dm_mod")
    assert module is not None
    assert variables.name(module.value_()) in ("__this_module", None)


@pytest.mark.parametrize("name", TASKS)
def test_per_cpu_is_where_drgn_has_it(name: str) -> None:
    """With debug info, which tells drgn its type."""
    dump = Dump(seen(name, "dwarf"))
    address = per_cpu(dump.prog["runqueues"], 1).address_
    told = dump.names.name(Lock("spinlock", address), [])
    assert told == Name(name="runqueues of cpu1")


def test_keys_of_lockdep_hide_no_variable(dump: Dump) -> None:
    """They are of no size, and the kernel's own table of symbols has no sizes."""
    at = defaultdict[int, set[str]](set)
    for symbol in finders_of(dump.prog).symbols(dump.prog, None, None, False):
        at[symbol.address].add(symbol.name)
    variables, compared = Variables(dump.context.layout, dump.losses), 0
    others = {
        address: {name for name in names if not name.startswith("__key")}
        for address, names in at.items()
    }
    beside = [each for each, names in at.items() if others[each] not in (names, set())]
    # Each costs a search of all symbols.
    for address in beside[::4]:
        if (name := variables.name(address)) is not None:
            compared += 1
            assert name in others[address]
    assert compared > 20


@pytest.mark.parametrize("name", [*TASKS, "memory-5.10"])
def test_slabs_are_as_drgn_has_them(name: str) -> None:
    """Also up to v5.16, where struct page has what there is of the allocator's."""
    context = seen(name).context()
    slabs, compared = Slabs(context.layout), 0
    tasks = list(for_each_task(context.reader.prog))
    for task in tasks[:: len(tasks) // 60]:
        places = (task.value_() + 100, task.cred.value_() + 3, task.signal.value_())
        for address in (*places, task.stack.value_() + 4096):
            found, known = slabs.find(address), slab_object_info(task.prog_, address)
            if known is None:
                assert found is None
                continue
            compared += 1
            assert found is not None
            assert found.start == known.address
            assert found.cache == known.slab_cache.name.string_().decode()
            assert found.start <= address < found.end
    assert compared > 150


# --- cost, and loss


def test_a_name_takes_few_reads(dump: Dump) -> None:
    names = LockNames(dump.seen.context())
    at, tasks = dump.context.layout.offset, dump.seen.table
    within = at("signal_struct", "cred_guard_mutex")
    locks = [Lock("mutex", s + within) for s in set(tasks["signal"].tolist())]
    within = at("mm_struct", "mmap_lock")
    mms = set(tasks["mm"].tolist()) - {0}
    locks += [Lock("rwsem", mm + within) for mm in mms]
    before = dump.seen.reader.reads
    assert all(names.name(lock, []).name for lock in locks)
    reads = dump.seen.reader.reads - before
    assert len(locks) > 200
    assert reads < MAX_READS * len(locks)
    # The second time it is known.
    for lock in locks:
        names.name(lock, [])
    assert dump.seen.reader.reads - before == reads


def test_what_is_lost_has_another_name_or_none() -> None:
    whole = dump_of(seen(TASKS[1]))
    lock = whole.lock("directory-make")
    inode = int(lock.address or 0) - whole.context.layout.offset("inode", "i_rwsem")
    hurt = Dump(damaged(TASKS[1]))
    lose_page(hurt.prog, inode)
    told = hurt.names.name(lock, [])
    # The memory map still knows the cache; what was found in it is gone.
    assert told.path is None
    assert told.cache in ("ext4_inode_cache", None)
    others = ("rename-mutex", "cmdline-read", "frozen-write")
    assert [hurt.name(each) for each in others] == [whole.name(each) for each in others]


def test_a_lost_device_costs_no_more_than_its_name() -> None:
    whole = dump_of(seen(TASKS[1]))
    lock, layout = whole.lock("rename-mutex"), whole.context.layout
    member = layout.offset("super_block", "s_vfs_rename_mutex")
    super_block = int(lock.address or 0) - member
    hurt = Dump(damaged(TASKS[1]))
    lose_page(hurt.prog, layout.member(super_block, "super_block", "s_bdev"))
    told = hurt.names.name(lock, [])
    assert told.device is None
    assert told.name == "s_vfs_rename_mutex of /mnt/slow"
    assert hurt.losses.lost["devices_unreadable"] == 1


def test_no_address_is_too_wild(dump: Dump) -> None:
    names = LockNames(dump.seen.context())
    for address in (0, 8, (1 << 64) - 8, 1 << 63, 0xDEAD_0000_0000_0100, 0x7FFF_0000):
        for type_ in get_args(LockTypeName):
            if type_ not in ("futex", "pi_futex"):
                assert names.name(Lock(type_, address), []).path is None


def test_process_of_an_address_space_that_names_none(
    dump: Dump, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without memory cgroups: it is the process that came first."""
    tasks = dump.context.tasks
    mms = sorted({*tasks["mm"][tasks["mm"] != 0].tolist()})[::40]
    named = [process_of(dump.context, mm) for mm in mms]
    assert len(mms) >= 3
    monkeypatch.setattr(lock_places(dump.context), "owner_of_mm", lambda mm: None)
    assert [process_of(dump.context, mm) for mm in mms] == named
