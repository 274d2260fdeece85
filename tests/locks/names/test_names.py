# SPDX-License-Identifier: LGPL-2.1-or-later

"""Names of locks, from the objects that contain them."""

import stat
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import get_args

import drgn
import pytest
from drgn.helpers.linux.block import disk_name, for_each_disk
from drgn.helpers.linux.fs import d_path, for_each_file, for_each_mount, mount_dst
from drgn.helpers.linux.module import find_module
from drgn.helpers.linux.pid import find_task, for_each_task
from drgn.helpers.linux.slab import slab_object_info
from msgspec.structs import replace

from msatools.kernel.report import LossLog
from msatools.locks import wait_queues
from msatools.locks.context import BlockedTask
from msatools.locks.described import process_of
from msatools.locks.names import LockNames, Name
from msatools.locks.places import Slabs, Variables, lock_places
from msatools.locks.report import Lock, LockTypeName
from msatools.locks.user_locks import requests as futex_requests
from msatools.selfdesc.load import finders_of
from tests.locks.seen import TASKS, Asked, Seen, Truth, damaged, seen
from tests.support.overlay import lose_page

MAX_READS = 24
"""Average reads that a lock's name may take; the memmap alone takes three."""


class Dump:
    """Names of the locks that tasks of one dump wait for."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.prog = seen.prog
        self.context = seen.context()
        self.losses = self.context.losses
        self.names = LockNames(self.context)

    def lock(self, name: str) -> Lock:
        """Return the kernel lock that a task waits for."""
        on = self.seen.on(name)
        assert on.address is not None
        return Lock(on.type, int(on.address))  # type: ignore[arg-type]

    def case(self, of: str | int) -> BlockedTask:
        return self.seen.case(of, self.context)

    def name(self, name: str) -> Name:
        return self.names.name(self.lock(name), [self.case(name)])

    def name_of(self, name: str, asked: Asked) -> Name:
        """Return the name of the lock in a task's request."""
        case = self.case(name)
        request = asked(self.context, case)
        assert request is not None
        return self.names.name(request.lock, [case])

    def member(
        self, type_: LockTypeName, address: int, type_name: str, member: str
    ) -> Name:
        """Return the name of a lock that is a member of a structure."""
        start = address + self.context.layout.offset(type_name, member)
        return self.names.name(Lock(type_, start), [])

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


# --- kernel locks that tasks wait for


# --- data, bits and queues


def test_folios_of_a_device_and_of_swap(dump: Dump) -> None:
    on = dump.truth("disk-fsync")
    # The task wrote at 12 MiB.
    assert dump.name_of("disk-fsync", wait_queues.folio_request) == Name(
        name=f"folio 3072 of {on['name']}", device=f"{on['name']} {on['device']}"
    )
    on = dump.truth("swap-in")
    if not dump.seen.is_as_said("swap-in"):
        return
    found = dump.name_of("swap-in", wait_queues.folio_request)
    assert found.pid == dump.seen.named["swap-in"]["pid"]
    assert found.name == f"anon folio of {found.pid}"
    assert found.device == f"{on['name']} {on['device']}"


def test_buffer(dump: Dump) -> None:
    on = dump.truth("directory-lookup")
    request = wait_queues.bit_request(dump.context, dump.case("directory-lookup"))
    assert request is not None
    head = drgn.Object(
        dump.prog, "struct buffer_head", address=request.lock.address or 0
    )
    assert dump.name_of("directory-lookup", wait_queues.bit_request) == Name(
        name=f"buffer {head.b_blocknr.value_()} of {on['name']}",
        device=f"{on['name']} {on['device']}",
        cache="buffer_head",
    )


def test_state_of_an_inode(dump: Dump) -> None:
    """A bit wait can have the address of any byte of i_state."""
    inode = dump.truth("directory-make")["inode"]
    lock = dump.lock("directory-make")
    at = dump.context.layout.offset
    start = int(lock.address or 0) - at("inode", "i_rwsem") + at("inode", "i_state")
    for byte in (0, 3):
        found = dump.names.name(Lock("bit_wait", start + byte, 7), [])
        assert (found.name, found.inode) == ("i_state of /mnt/slow/busy", inode)


def test_lock_on_a_stack(dump: Dump) -> None:
    for task in list(for_each_task(dump.prog))[::200]:
        if not task.stack:
            continue
        pid = task.pid.value_()
        found = dump.names.name(Lock("completion", task.stack.value_() + 8192), [])
        assert found == Name(name=f"on the stack of {pid}", pid=pid)


# --- futexes


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


# --- locks without waiters in these dumps


def test_disks_and_their_queues(dump: Dump) -> None:
    compared = 0
    for disk in for_each_disk(dump.prog):
        address, name = disk.value_(), disk_name(disk).decode()
        found = dump.member("mutex", address, "gendisk", "open_mutex")
        assert found.name == f"open_mutex of {name}"
        assert (found.device or "").startswith(f"{name} ")
        queue = disk.queue.value_()
        found = dump.member("mutex", queue, "request_queue", "sysfs_lock")
        assert found.name == f"sysfs_lock of {name}"
        found = dump.member("wait_queue", queue, "request_queue", "mq_freeze_wq")
        assert found.name == f"mq_freeze_wq of {name}"
        part = disk.part0.value_()
        found = dump.member("mutex", part, "block_device", "bd_fsfreeze_mutex")
        assert found.name == f"bd_fsfreeze_mutex of {name}"
        bdi = disk.bdi.value_()
        found = dump.member("wait_queue", bdi, "backing_dev_info", "wb_waitq")
        number = f"{disk.major.value_()}:{disk.first_minor.value_()}"
        assert found.name == f"wb_waitq of {number}"
        compared += 1
    assert compared > 4


def test_every_mount(dump: Dump) -> None:
    compared = set()
    for mount in for_each_mount(dump.prog):
        super_block = mount.mnt.mnt_sb.value_()
        if super_block in compared:
            continue
        compared.add(super_block)
        found = dump.member("rwsem", super_block, "super_block", "s_umount")
        assert found.path == mount_dst(mount).decode()
        assert found.name == f"s_umount of {found.path}"
        inode = mount.mnt.mnt_root.d_inode
        found = dump.member("rwsem", inode.value_(), "inode", "i_data.invalidate_lock")
        assert found.name == f"invalidate_lock of {mount_dst(mount).decode()}"
        assert found.inode == inode.i_ino.value_()
    assert len(compared) > 6


def test_open_files(dump: Dump) -> None:
    paths = set()
    for name in ("file-read", "pipe-read", "disk-read", "tcp-accept", "flock"):
        task = find_task(dump.prog, dump.seen.named[name]["tid"])
        for _, file in for_each_file(task):
            if not file:
                continue
            address = file.value_()
            found = dump.member("mutex", address, "file", "f_pos_lock")
            assert found.inode in (file.f_inode.i_ino.value_(), None)
            inode = file.f_inode
            path = d_path(file.f_path).decode()
            for kind, test in (("pipe", stat.S_ISFIFO), ("socket", stat.S_ISSOCK)):
                if test(inode.i_mode.value_()):
                    path = f"{kind}:[{inode.i_ino.value_()}]"
            # Deleted files are marked as in /proc.
            name = (found.name or "").removesuffix(" (deleted)")
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
        found = dump.member("wait_queue", file.private, "socket", "wq.wait")
        assert (found.name, found.inode) == (f"socket:[{inode}]", inode)
        sock = dump.context.layout.member(file.private, "socket", "sk")
        found = dump.member("wait_queue", sock, "sock", "sk_lock.wq")
        assert (found.name, found.inode) == (f"lock of socket:[{inode}]", inode)


def test_terminals_and_trees(dump: Dump) -> None:
    file = dump.case("tty-read").file
    assert file is not None
    tty = drgn.Object(dump.prog, "struct tty_file_private *", value=file.private).tty
    found = dump.member("mutex", tty.value_(), "tty_struct", "atomic_write_lock")
    assert found.name == f"atomic_write_lock of {tty.name.string_().decode()}"
    (root,) = (
        mount.mnt.mnt_root
        for mount in for_each_mount(dump.prog)
        if mount_dst(mount) == b"/sys"
    )
    node = drgn.Object(
        dump.prog, "struct kernfs_node *", value=root.d_inode.i_private.value_()
    )
    found = dump.member("rwsem", node.dir.root.value_(), "kernfs_root", "kernfs_rwsem")
    assert found.name == "kernfs_rwsem of /sys"


def test_address_near_a_lock_is_not_the_lock(dump: Dump) -> None:
    """One word after an inode's lock, the name is an offset in the slab object."""
    lock = dump.lock("directory-make")
    near = Lock("rwsem", int(lock.address or 0) + 8)
    found = dump.names.name(near, [])
    assert str(found.name).startswith("ext4_inode_cache+0x")
    # The inode that contains it is still known.
    assert found.path == "/mnt/slow/busy"
    assert str(found.name).endswith(" of /mnt/slow/busy")
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
    # Functions and per-CPU offsets are not variables.
    assert variables.name(layout.symbol("schedule") or 0) is None
    assert variables.name(layout.symbol("runqueues") or 0) is None
    assert variables.name(find_task(prog, 1).value_()) is None
    module = find_module(prog, b"dm_mod")
    assert module is not None
    assert variables.name(module.value_()) in ("__this_module", None)


def test_lockdep_keys_hide_no_variable(dump: Dump) -> None:
    """Lockdep keys have size 0, and kallsyms has no sizes."""
    by_address = defaultdict[int, set[str]](set)
    for symbol in finders_of(dump.prog).symbols(dump.prog, None, None, False):
        by_address[symbol.address].add(symbol.name)
    variables, compared = Variables(dump.context.layout, dump.losses), 0
    others = {
        address: {name for name in names if not name.startswith("__key")}
        for address, names in by_address.items()
    }
    shared = [
        address
        for address, names in by_address.items()
        if others[address] not in (names, set())
    ]
    # Each lookup searches all symbols.
    for address in shared[::4]:
        if (name := variables.name(address)) is not None:
            compared += 1
            assert name in others[address]
    assert compared > 20


@pytest.mark.parametrize("name", [*TASKS, "memory-5.10"])
def test_slabs_are_as_in_drgn(name: str) -> None:
    """This includes kernels up to v5.16, which keep slab fields in struct page."""
    context = seen(name).context()
    slabs, compared = Slabs(context.layout), 0
    tasks = list(for_each_task(context.reader.prog))
    for task in tasks[:: len(tasks) // 60]:
        inside = (task.value_() + 100, task.cred.value_() + 3, task.signal.value_())
        for address in (*inside, task.stack.value_() + 4096):
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


# --- costs and losses


def test_name_takes_few_reads(dump: Dump) -> None:
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
    # The second time, names are cached.
    for lock in locks:
        names.name(lock, [])
    assert dump.seen.reader.reads - before == reads


def test_lock_in_an_unreadable_object() -> None:
    whole = dump_of(seen(TASKS[1]))
    lock = whole.lock("directory-make")
    inode = int(lock.address or 0) - whole.context.layout.offset("inode", "i_rwsem")
    hurt = Dump(damaged(TASKS[1]))
    lose_page(hurt.prog, inode)
    found = hurt.names.name(lock, [])
    # The slab cache is still known from the memmap, but not the inode's path.
    assert found.path is None
    assert found.cache in ("ext4_inode_cache", None)
    others = ("rename-mutex", "cmdline-read", "frozen-write")
    for other in others:
        assert hurt.name(other) == whole.name(other)


def test_lost_device_costs_only_its_name() -> None:
    whole = dump_of(seen(TASKS[1]))
    lock, layout = whole.lock("rename-mutex"), whole.context.layout
    member = layout.offset("super_block", "s_vfs_rename_mutex")
    super_block = int(lock.address or 0) - member
    hurt = Dump(damaged(TASKS[1]))
    lose_page(hurt.prog, layout.member(super_block, "super_block", "s_bdev"))
    found = hurt.names.name(lock, [])
    assert found.device is None
    assert found.name == "s_vfs_rename_mutex of /mnt/slow"
    assert hurt.losses.lost["devices_unreadable"] == 1


def test_invalid_addresses_have_no_path(dump: Dump) -> None:
    names = LockNames(dump.seen.context())
    for address in (0, 8, (1 << 64) - 8, 1 << 63, 0xDEAD_0000_0000_0100, 0x7FFF_0000):
        for type_ in get_args(LockTypeName):
            if type_ not in ("futex", "pi_futex"):
                assert names.name(Lock(type_, address), []).path is None


def test_process_of_an_address_space_without_an_owner(
    dump: Dump, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory cgroups there is no mm->owner: the first process is used."""
    tasks = dump.context.tasks
    mms = sorted({*tasks["mm"][tasks["mm"] != 0].tolist()})[::40]
    named = [process_of(dump.context, mm) for mm in mms]
    assert len(mms) >= 3
    monkeypatch.setattr(lock_places(dump.context), "owner_of_mm", lambda mm: None)
    assert [process_of(dump.context, mm) for mm in mms] == named
