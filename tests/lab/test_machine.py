# SPDX-License-Identifier: LGPL-2.1-or-later
from pathlib import Path

from fixtures.lab.machine import Machine, Node, disk_arguments
from fixtures.lab.machines import AnyMachine

TWO_NODES = Machine(nodes=(Node(1280, "0"), Node(768, "1")), low_mib=1024)


def test_nodes_and_the_gap_below_4_gib() -> None:
    arguments = " ".join(TWO_NODES.arguments())
    assert "q35,max-ram-below-4g=1024M" in arguments
    assert "-m 2048M" in arguments
    assert "node,nodeid=1,cpus=1,memdev=memory1" in arguments


def test_many_cpus_share_one_thread() -> None:
    assert "tcg,thread=multi" in TWO_NODES.arguments()
    assert "tcg,thread=single" in Machine((Node(512, "0-7"),), cpus=8).arguments()


def test_a_node_may_have_no_memory() -> None:
    arguments = AnyMachine((Node(1024, "0"), Node(0, "1"))).arguments()
    assert "node,nodeid=0,cpus=0,memdev=memory0" in arguments
    assert "node,nodeid=1,cpus=1" in arguments
    assert "id=memory1" not in " ".join(arguments)
    assert arguments.count("-object") == 1


def test_disks_are_numbered_and_root_is_not_written() -> None:
    disks = {"root": Path("/a,b/root.img"), "out": Path("/out")}
    arguments = " ".join(disk_arguments(disks))
    assert (
        "id=root,format=raw,snapshot=on,cache=unsafe,file=/a,,b/root.img" in arguments
    )
    assert "id=out,format=raw,snapshot=off" in arguments
    assert "nvme-ns,drive=out,bus=nvme,nsid=2" in arguments
