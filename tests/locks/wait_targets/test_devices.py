# SPDX-License-Identifier: LGPL-2.1-or-later

"""Names of devices and file systems in wait targets."""

import re

import pytest
from drgn.helpers.linux.fs import for_each_mount
from drgn.helpers.linux.list import list_for_each_entry

from fixtures import lab
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.locks.storage import Storage
from msatools.locks.struct_reader import Layout
from msatools.render.on import on_text
from tests.locks.seen import seen
from tests.support.dumps import open_dump
from tests.support.overlay import lose

CONTAINED = ("contained-6.12", pytest.param("contained-6.1", marks=pytest.mark.long))


@pytest.mark.parametrize("name", CONTAINED)
def test_fault_on_a_mapped_device(name: str) -> None:
    """The target has the device's data and number, not those of its node in /dev."""
    dump = seen(name)
    expected = dump.named["fault-disk"]["on"]
    found = dump.on("fault-disk")
    assert {key: getattr(found, key) for key in expected} == expected
    assert (found.inode, found.fs) == (None, None)
    assert on_text(found) == f"{expected['path']} {expected['device'].split()[0]}"


@pytest.mark.parametrize("name", ["memory-5.10", "tasks-6.12"])
def test_all_mounts(name: str) -> None:
    """Mounts have a disk's name and number (also before 5.11) or a file system type."""
    prog, losses = open_dump(name, "btf"), LossLog()
    layout = Layout(Reader(prog))
    storage = Storage(layout, losses)
    mounts = lab.build(name).truth("proc/mounts").decode().splitlines()
    types = {line.split()[2] for line in mounts} | {"rootfs"}
    disks = 0
    for mount in for_each_mount(prog["init_task"].nsproxy.mnt_ns):
        block = mount.mnt.mnt_sb
        inode = storage.inode(block.s_root.d_inode.value_())
        device, fs = storage.device_of(inode), storage.file_system_of(inode)
        assert (device is None) != (fs is None)
        if fs is not None:
            kind = block.s_type.name.string_().decode()
            assert fs == kind
            assert kind in types
            continue
        disks += 1
        numbers = int(block.s_dev)
        disk, number = (device or "").split()
        assert number == f"{numbers >> 20}:{numbers & 0xFFFFF}"
        assert re.fullmatch(r"nvme\dn\d+|dm-\d", disk), device
    assert disks
    assert not losses.notes


def test_lost_file_system_costs_only_its_name() -> None:
    prog = open_dump("locks-6.12", "btf")
    (block,) = (
        block
        for block in list_for_each_entry(
            "struct super_block", prog["super_blocks"].address_of_(), "s_list"
        )
        if block.s_type.name.string_() == b"devtmpfs"
    )
    inode = block.s_root.d_inode.value_()
    losses = LossLog()
    storage = Storage(Layout(Reader(prog)), losses)
    known = storage.inode(inode)
    lose(prog, block.s_id.address_, len(block.s_id))
    for _ in range(2):
        assert storage.file_system_of(known) is None
    assert losses.lost["file_systems_unreadable"] == 1
