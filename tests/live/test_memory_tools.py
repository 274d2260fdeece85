# SPDX-License-Identifier: LGPL-2.1-or-later

"""A guest's memory as the tools themselves write it: LiME, AVML and libvirt.

LiME and AVML read it from inside, while the guest runs on: what does not change in it
is compared with QEMU's dump of the moment after. They come from Debian's archive and
from crates.io; AVML takes minutes to build, so that its tests are long.
"""

import gzip
import os
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab import headers, host
from fixtures.lab.cache import content_key
from fixtures.lab.image import cpio_entry, load_order
from fixtures.lab.packages import Archive, Package, extract
from msatools.program.model import NotADumpError
from tests.live.test_memory_files import (
    PANIC,
    Machine,
    dump,
    opened,
    running,
    wait_for,
)
from tests.program.raw import writers
from tests.program.raw.answers import answers

MACHINE = Machine(320, "q35", "", "0.3")
AVML_VERSION = "0.21.0"
BUILD_SECONDS = 1500
DISK_BYTES = 3 << 30
LIME_PACKAGE = "lime-forensics-dkms"

INIT = """\
#!/bin/busybox sh
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
for module in /modules/*.ko; do insmod $module; done
until [ -b /dev/nvme0n1 ]; do sleep 0.1; done
mount -t ext4 /dev/nvme0n1 /out
for number in 1 2 3; do sleep 100000 & done
sh -c 'sleep 0 & exec sleep 100001' &
sleep 1
# By itself LiME leaves out the rest of a range of which a page took over a second.
write_lime() { insmod /lime.ko path=/out/$name timeout=0 "$@"; rmmod lime; }
for name in TOOLS; do
    echo TOOL-$name
    case $name in
    lime|padded|raw) write_lime format=$name ;;
    deflated) write_lime format=lime compress=1 ;;
    avml) /avml acquire /out/$name ;;
    snappy) /avml acquire --compress /out/$name ;;
    esac
    sync
    umount /out
    echo DONE-$name
    # What QEMU dumps meanwhile is as the tool has left it.
    sleep 5
    mount -t ext4 /dev/nvme0n1 /out
done
echo TOOLS-END
sleep 100000
"""
LIME_FORMATS = "lime", "padded", "raw", "deflated"
AVML_FORMATS = "avml", "snappy"
MOVED = 64
"""Maximum of pages of the kernel that came or went while a tool ran."""

READ = {
    "lime": "LiME, 0.3 GiB, kernel found at ",
    "padded": "raw memory, 0.3 GiB, kernel found at ",
    "raw": "raw memory, 0.3 GiB, kernel found at ",
    "avml": "LiME, ",
    "snappy": "AVML, snappy, ",
}


def lime(run: lab.Run) -> Path:
    """Return LiME's module, from the source that Debian has."""
    archive = Archive(run.cache)
    (version,) = archive.versions([LIME_PACKAGE]).values()
    (package,) = archive.download("lime", [Package(LIME_PACKAGE, version)])
    with run.cache.scratch() as scratch:
        extract([package], scratch)
        (source,) = scratch.glob("usr/src/lime-forensics-*")
        return headers.build_module("lime", source, run.kernel, run.cache)


def avml(run: lab.Run) -> Path:
    """Return AVML, linked statically."""

    def fill(directory: Path) -> None:
        command = ["cargo", "install", "avml", "--version", AVML_VERSION, "--locked"]
        host.run(
            [
                *("env", "RUSTFLAGS=-C target-feature=+crt-static", *command),
                *("--no-default-features", "--target", "x86_64-unknown-linux-gnu"),
                *("--root", str(directory)),
            ],
            timeout=BUILD_SECONDS,
        )

    key = content_key([AVML_VERSION])
    return run.cache.entry("program", "avml", key, fill) / "bin/avml"


def initramfs(run: lab.Run, names: Sequence[str], tools: dict[str, Path]) -> bytes:
    """Return what the guest boots from."""
    busybox = Archive(run.cache)
    (version,) = busybox.versions(["busybox-static"]).values()
    (package,) = busybox.download("busybox", [Package("busybox-static", version)])
    archive = bytearray()
    for name in ("bin", "dev", "proc", "sys", "out", "modules"):
        archive += cpio_entry(name, 0o40755)
    with run.cache.scratch() as scratch:
        extract([package], scratch)
        (program,) = scratch.glob("**/bin/busybox")
        archive += cpio_entry("bin/busybox", 0o100755, program.read_bytes())
    for number, module in enumerate(load_order(run.kernel.modules, ["nvme", "ext4"])):
        path = f"modules/{number:02}-{module.name}.ko"
        archive += cpio_entry(path, 0o100644, module.data)
    for name, path in tools.items():
        archive += cpio_entry(name, 0o100755, path.read_bytes())
    init = INIT.replace("TOOLS;", f"{' '.join(names)};").encode()
    archive += cpio_entry("init", 0o100755, init)
    archive += cpio_entry("TRAILER!!!", 0)
    return gzip.compress(bytes(archive), compresslevel=1)


Written = dict[str, tuple[Path, Path]]
"""Files by tools, each with QEMU's dump of the moment after."""


@pytest.fixture(scope="module")
def by_lime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    run = lab.build("memory-6.12")
    folder = tmp_path_factory.mktemp("lime")
    yield write(run, folder, LIME_FORMATS, {"lime.ko": lime(run)})
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def by_avml(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    if shutil.which("cargo") is None:
        pytest.skip("there is no cargo, which builds AVML")
    run = lab.build("memory-6.12")
    folder = tmp_path_factory.mktemp("avml")
    yield write(run, folder, AVML_FORMATS, {"avml": avml(run)})
    shutil.rmtree(folder)


def write(
    run: lab.Run, folder: Path, names: Sequence[str], tools: dict[str, Path]
) -> Written:
    """Have a guest written by tools, each with QEMU's dump of the moment after."""
    archive = folder / "archive"
    archive.write_bytes(initramfs(run, names, tools))
    disk = folder / "disk"
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", str(disk)], check=True)
    drive = f"if=none,id=disk,format=raw,cache=unsafe,file={disk}"
    arguments = [
        *("-device", "nvme,serial=lab,id=nvme", "-drive", drive),
        *("-device", "nvme-ns,drive=disk,bus=nvme,nsid=1"),
    ]
    files = {}
    with ExitStack() as stack:
        qmp = stack.enter_context(
            running(folder, MACHINE, b"TOOL-", archive=archive, arguments=arguments)
        )
        for name in names:
            wait_for(folder / "console", f"DONE-{name}".encode())
            qmp.execute("stop")
            (folder / f"{name}.at").mkdir()
            elf = dump(qmp, folder / f"{name}.at")
            image = folder / name
            words = ["debugfs", "-R", f"dump /{name} {image}", str(disk)]
            subprocess.run(words, check=True, capture_output=True)
            files[name] = image, elf
            qmp.execute("cont")
    return files


def steady(path: Path) -> dict[str, Any]:
    """Return what commands say of a guest's memory that a second does not change."""
    found = answers(path, "memstat", "prstat", "zombies")
    memstat = found["memstat"]
    pages = {each["name"]: each["pages"] for each in memstat["classes"]}
    tasks = found["prstat"]["tasks"]
    return {
        "pages": memstat["pages"],
        "reserved": pages["reserved"],
        "programs": {
            (each["pid"], each["comm"]) for each in tasks if not each["kthread"]
        },
        "zombies": {
            (each["pid"], each["comm"], each["verdict"])
            for each in found["zombies"]["zombies"]
            # Others, of the script's steps and of ext4, are gone a moment later.
            if each["comm"] == "sleep"
        },
        "classes": pages,
    }


@pytest.mark.live
@pytest.mark.parametrize("name", LIME_FORMATS[:3])
def test_lime(by_lime: Written, name: str) -> None:
    check(by_lime, name)


@pytest.mark.live
@pytest.mark.long
@pytest.mark.parametrize("name", AVML_FORMATS)
def test_avml(by_avml: Written, name: str) -> None:
    check(by_avml, name)


def check(written: Written, name: str) -> None:
    """Check what is read of a file by what QEMU has of the same guest."""
    target = opened(written[name][0])
    assert target.format.startswith(READ[name])
    assert not target.truncated
    image, elf = written[name]
    found, expected = steady(image), steady(elf)
    classes, others = found.pop("classes"), expected.pop("classes")
    sleepers, others_there = found.pop("programs"), expected.pop("programs")
    # Those of the script's own steps come and go.
    assert len({each for each in sleepers & others_there if each[1] == "sleep"}) >= 4
    assert found == expected
    assert {each[1] for each in found["zombies"]} == {"sleep"}
    assert sum(classes.values()) == found["pages"]
    # What the tool itself wrote went through the page cache meanwhile.
    for each in {*classes, *others} - {"kernel.slab", "kernel.unattributed"}:
        if each.startswith("kernel."):
            assert abs(classes.get(each, 0) - others.get(each, 0)) <= MOVED, each


@pytest.mark.live
def test_compressed_by_lime(by_lime: Written) -> None:
    """The command of the line that refuses it leads to a file that is read."""
    image, _ = by_lime["deflated"]
    with pytest.raises(NotADumpError, match="compressed with zlib") as raised:
        opened(image)
    assert f"`pigz -dc < {image} > memory`" in raised.value.what_to_do
    memory = image.with_suffix(".memory")
    memory.write_bytes(zlib.decompress(image.read_bytes()))
    assert opened(memory).format.startswith(READ["lime"])


DOMAIN = """\
<domain type='qemu'><name>guest</name><memory unit='MiB'>512</memory><vcpu>2</vcpu>
<os><type arch='x86_64' machine='pc'>hvm</type><kernel>{kernel}</kernel>
<cmdline>console=ttyS0 panic=0</cmdline></os><features><acpi/></features>
<cpu mode='maximum'/><on_crash>preserve</on_crash><devices><memballoon model='none'/>
<emulator>{qemu}</emulator>
<serial type='file'><source path='{folder}/console'/></serial>
<disk type='file' device='disk'><driver name='qemu' type='qcow2'/>
<source file='{folder}/disk'/><target dev='vda' bus='virtio'/></disk></devices></domain>
"""
LIBVIRT = """\
stdio_handler = "file"
security_driver = "none"
user = "root"
group = "root"
remember_owner = 0
cgroup_controllers = []
namespaces = []
"""
OF_LIBVIRT = {
    "elf": "ELF without a note, 0.5 GiB, kernel found at ",
    "kdump": "kdump without a note, 0.5 GiB, kernel found at ",
    "disk": "savevm 'snap', 0.5 GiB, kernel found at ",
    "saved": "virsh save, 0.5 GiB, kernel found at ",
}


@pytest.mark.live
def test_libvirt() -> None:
    """What libvirt writes of one stop: dumps, a snapshot with memory, a saved guest."""
    if shutil.which("virsh") is None or os.geteuid() != 0:
        pytest.skip("there is no libvirt, or it may not be run")
    qemu = shutil.which("qemu-system-x86_64")
    kernel = lab.build("memory-6.12").vmlinux.with_name("vmlinuz")
    # The path of a socket in it has to be short.
    with tempfile.TemporaryDirectory(prefix="virsh") as made:
        folder = Path(made)
        (folder / "etc").mkdir()
        (folder / "etc/qemu.conf").write_text(LIBVIRT)
        words = DOMAIN.format(kernel=kernel, qemu=qemu, folder=folder)
        (folder / "domain").write_text(words)
        disk = ["qemu-img", "create", "-q", "-f", "qcow2", str(folder / "disk"), "64M"]
        subprocess.run(disk, check=True)
        # No daemon: the driver runs in virsh.
        command = ["virsh", "-q", "-c", f"qemu:///embed?root={folder}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as virsh:
            assert virsh.stdin is not None
            virsh.stdin.write(f"create {folder}/domain\n")
            virsh.stdin.flush()
            try:
                wait_for(folder / "console", PANIC)
                virsh.stdin.write(
                    "suspend guest\n"
                    f"dump --memory-only --format elf guest {folder}/elf\n"
                    f"dump --memory-only --format kdump-zlib guest {folder}/kdump\n"
                    "snapshot-create-as guest snap\n"
                    f"save guest {folder}/saved\n"
                )
            finally:
                virsh.stdin.write("destroy guest\nquit\n")
                virsh.stdin.close()
                virsh.wait()
        plain = writers.without(folder / "elf", folder / "plain", b"CORE", b"QEMU")
        named = "memstat", "prstat", "zombies", "locks", "report"
        expected = answers(plain, *named)
        for name, start in OF_LIBVIRT.items():
            target = opened(folder / name)
            assert target.format.startswith(start), name
            assert (target.torn, target.truncated) == (0, False)
            if name != "elf":
                found = answers(folder / name, *named)
                for report in found.values():
                    report["target"]["dump_level"] = None
                assert found == expected, name
