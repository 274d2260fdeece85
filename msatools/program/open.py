# SPDX-License-Identifier: LGPL-2.1-or-later

"""Opening of targets: a dump, the running kernel, a QEMU guest, or a kernel's log.

Kdumps whose pages libkdumpfile must not read are read here.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal, NamedTuple

import drgn
import numpy as np
from drgn import Architecture, FaultError, ModuleFileStatus, Platform, Program
from msgspec import Struct

from msatools.errors import LOST, DamagedDataError
from msatools.program import description, formats
from msatools.program.description import describe_opened
from msatools.program.dumpfile import DumpFile, os_error, read_dump_file
from msatools.program.formats import NAMELESS
from msatools.program.kdump_pages import (
    AnyPages,
    KdumpPages,
    LeftToDrgnError,
    SplitPages,
)
from msatools.program.linear import KERNEL_HALF, map_kernel
from msatools.program.model import (
    KCORE,
    DamagedDumpError,
    NotADumpError,
    NotPermittedError,
    NoTypesError,
    Target,
    TargetError,
    damaged_types,
    losses_refused,
)
from msatools.selfdesc import (
    BtfError,
    NotSelfDescribedError,
    load_btf,
    main_module,
)
from msatools.selfdesc.find import ask
from msatools.standby import standby_of

if TYPE_CHECKING:
    from msatools.program.log_text import LogBytes

_PROC = "/proc"
_LOCKDOWN = "/sys/kernel/security/lockdown"
_CAP_SYS_RAWIO = 17

# Values of utsname.machine that differ from drgn's names of architectures.
_ARCHITECTURES = {"i686": "I386", "armv7l": "ARM", "ppc64le": "PPC64"}

_MASKED = (Architecture.X86_64, Architecture.AARCH64, Architecture.RISCV64)
"""Architectures whose user addresses are below the kernel's half."""


class TargetSpec(Struct, frozen=True):
    """A target as requested: without path and guest, the running kernel."""

    path: str | None = None
    """Path of a dump, or ``/proc/kcore``."""

    qemu: str | None = None
    """Path or ``host:port`` of a QMP socket."""

    vmlinux: str | None = None
    """Path of the debug info of the kernel proper; ``None`` to let drgn find it."""

    types: Literal["auto", "dwarf", "btf"] = "auto"
    """Source of types; ``auto`` for debug info if found, else BTF."""

    debuginfod: bool = False
    """Whether debug info may be fetched from the network."""

    kernel: int | None = None
    """Number of the kernel, from 1, in a file without a note that has several;
    ``None`` for the one with the most memory. Of a log, number of the boot."""

    vmcoreinfo: str | None = None
    """Path of a file with VMCOREINFO; ``None`` to find it in the dump."""

    takes_logs: bool = False
    """Whether a text with a kernel's log is accepted as a target."""

    text: "LogBytes | None" = None
    """The text from standard input, if that is the target."""

    @property
    def is_live(self) -> bool:
        """Whether the target is this machine's kernel or a guest, not a file."""
        return self.path is None or os.path.realpath(self.path) == KCORE


class Opened(NamedTuple):
    """An opened target, with its types loaded."""

    prog: Program
    target: Target


def open_target(spec: TargetSpec) -> Opened:
    """Open a target and load types and symbols of the kernel proper.

    :raises TargetError: if it cannot be opened, or has no types; the subclasses in
        :mod:`msatools.program.model` distinguish the reasons
    """
    path = spec.qemu or spec.path or KCORE
    with losses_refused(path, live=spec.is_live):
        return _open(spec, path)


def _open(spec: TargetSpec, path: str) -> Opened:
    dump = None
    steady: AbstractContextManager[None] = nullcontext()
    if spec.qemu is None and not spec.is_live:
        try:
            dump = None if spec.text else read_dump_file(path)
        except NotADumpError:
            if (log := _open_log(path, spec)) is not None:
                return log
            raise
        if (dump is None or dump.kind == "raw") and (log := _open_log(path, spec)):
            return log
        if dump is None:
            raise NotADumpError(
                "standard input", "no kernel log", "name a dump by its path"
            )
        prog, dump = _open_file(path, spec, dump)
    else:
        # Not imported for dumps: it takes 4 ms.
        from msatools.program import live

        prog = _open_kcore(path) if spec.qemu is None else live.open_guest(path)
        steady = live.steady(prog)
    try:
        with steady:
            try:
                _load_types(prog, path, spec)
            except NoTypesError as error:
                if dump is None or not dump.damage:
                    raise
                # Missing parts of a split dump are the reason that no types were found;
                # other damage may be.
                lacks_parts = dump.missing_pfns is not None
                why = dump.damage if lacks_parts else f"{dump.damage}, and {error.why}"
                raise DamagedDumpError(path, why, dump.remedy) from error
            if dump is not None:
                map_kernel(prog)
            return Opened(prog, describe_opened(prog, path, dump))
    except BtfError as error:
        raise damaged_types(path, error) from error


def _open_log(path: str, spec: TargetSpec) -> Opened | None:
    """Open a text as a kernel's log; ``None`` if it is none, or none is accepted."""
    if spec.text is None and not spec.takes_logs:
        return None
    # Imported here, as few targets are logs.
    from msatools.program.foreign import may_be_log
    from msatools.program.log_text import open_log

    try:
        if spec.text is None and not may_be_log(path):
            return None
    except OSError as error:
        raise os_error(path, error) from error
    opened = open_log(path, spec.text, spec.kernel)
    for option, is_given in (
        ("-s", spec.vmlinux is not None),
        ("--types", spec.types != "auto"),
        ("--debuginfod", spec.debuginfod),
        ("--vmcoreinfo", spec.vmcoreinfo is not None),
    ):
        if opened is not None and is_given:
            raise TargetError(
                path, "a kernel's log, which has no types", f"leave out {option}"
            )
    return None if opened is None else Opened(*opened)


def _load_types(prog: Program, path: str, spec: TargetSpec) -> None:
    """Load types and symbols of the kernel proper, from one source only."""
    standby = standby_of(prog)
    if standby is not None:
        standby.stand_down()
    if spec.vmlinux is not None:
        description.load_named(prog, spec.vmlinux)
        return
    missing = []
    if spec.types != "btf":
        if description.load_found(prog, debuginfod=spec.debuginfod):
            return
        missing.append(f"no debug info found for {description.release_of(prog)}")
    if spec.types != "dwarf":
        try:
            load_btf(prog, modules=False)
        except NotSelfDescribedError as error:
            missing.append(str(error))
        else:
            # A later request to load debug info must not replace BTF.
            main_module(prog).debug_file_status = ModuleFileStatus.DONT_NEED
            return
    what_to_do = description.how_to_get(prog)
    if spec.types == "btf":
        what_to_do = "leave out --types btf and name the kernel's vmlinux with -s"
    raise NoTypesError(path, ", and ".join(missing), what_to_do)


def _open_file(path: str, spec: TargetSpec, dump: DumpFile) -> tuple[Program, DumpFile]:
    """Open a dump, or a file with memory in which the kernel has to be found."""
    if dump.kind == "raw" or dump.lacks_note is not None:
        # Imported here, as few targets are such files.
        from msatools.program.raw_formats import memory_in
        from msatools.program.raw_program import open_memory

        memory = memory_in(path, dump)
        prog, dump = open_memory(path, dump, memory, spec.kernel, spec.vmcoreinfo)
        mask_user_addresses(prog)
        return prog, dump
    for option, value in (
        ("--kernel", spec.kernel),
        ("--vmcoreinfo", spec.vmcoreinfo),
    ):
        if value is not None:
            raise TargetError(
                path, "it says itself where its kernel is", f"leave out {option}"
            )
    return _open_dump(path, dump), dump


def _open_dump(path: str, dump: DumpFile) -> Program:
    if dump.kind == "kdump" and not drgn._with_libkdumpfile:
        raise TargetError(
            path,
            "this drgn was built without libkdumpfile, which reads kdumps",
            "install drgn's wheel, or build it with libkdumpfile",
        )
    prog = Program(platform=_platform_of(path, dump))
    try:
        if dump.parts not in ((), (path,)):
            set_parts(prog, path, dump.parts)
        elif dump.lacks_end:
            set_flat_headers(prog, path)
        elif dump.bad_descriptors:
            set_kdump_read_here(prog, path, "descriptors of pages are damaged")
        elif dump.is_nameless_arm64:
            set_kdump_read_here(prog, path, "libkdumpfile does not find its pages")
        else:
            ask(prog.set_core_dump, path)
    except OSError as error:
        raise os_error(path, error) from error
    except LOST as error:
        # drgn's text is for developers.
        if dump.truncated:
            raise DamagedDumpError(
                path, "cut off before its pages can be found", "copy the dump again"
            ) from error
        raise DamagedDumpError(
            path, f"drgn cannot open it: {error}", "copy or take the dump again"
        ) from error
    if not prog.flags & drgn.ProgramFlags.IS_LINUX_KERNEL:
        raise NotADumpError(path, "not a dump of Linux", "name a vmcore")
    mask_user_addresses(prog)
    return prog


def mask_user_addresses(prog: Program) -> None:
    """Let reads of user addresses fail.

    The segments of QEMU's ELF dumps have p_vaddr 0, so that a NULL pointer would lead
    to the interrupt table of real mode. In kdumps it would lead to the process that ran
    when the dump was taken.
    """
    assert prog.platform is not None
    if prog.platform.arch in _MASKED:
        prog.add_memory_segment(0, KERNEL_HALF, _fault)


def _fault(address: int, count: int, offset: int, physical: bool) -> bytes:
    raise FaultError("not an address of the kernel", address)


def _platform_of(path: str, dump: DumpFile) -> Platform | None:
    """Return the platform of a kdump that does not show it; ``None`` for others.

    QEMU (seen in 7.2) leaves all of utsname but the machine blank in its kdumps, and
    libkdumpfile then cannot determine the architecture.
    """
    if dump.machine is None or dump.release is not None:
        return None
    if dump.is_nameless_arm64:
        return Platform(Architecture.AARCH64)
    if dump.machine == NAMELESS:
        raise TargetError(
            path,
            "a kdump by QEMU of a machine that QEMU has no name for",
            "dump the guest as ELF: dump-guest-memory without -z, -l or -s",
        )
    name = _ARCHITECTURES.get(dump.machine, dump.machine.upper())
    try:
        return Platform(Architecture[name])
    except KeyError:
        return None


def _open_kcore(path: str) -> Program:
    from msatools.program import live

    try:
        _check_kcore(path)
        return live.open_kcore()
    except FileNotFoundError as error:
        raise _no_kcore(path) from error
    except PermissionError as error:
        raise _not_permitted(path) from error
    except LOST as error:
        raise TargetError(
            path, f"drgn cannot open it: {error}", "name a dump instead"
        ) from error


def _check_kcore(path: str) -> None:
    """Check that /proc/kcore is the kernel's own: containers may replace it.

    :raises OSError: if it does not exist
    """
    if os.stat(KCORE).st_dev != os.stat(_PROC).st_dev:
        raise TargetError(
            path,
            "something else is mounted over it, as in a container",
            "run outside of the container",
        )


def _no_kcore(path: str) -> TargetError:
    if not os.path.exists(f"{_PROC}/self"):
        return TargetError(
            path, "/proc is not mounted", "mount it: mount -t proc proc /proc"
        )
    return TargetError(
        path,
        "no such file",
        "this kernel or container offers none: name a dump instead",
    )


def _not_permitted(path: str) -> NotPermittedError:
    lockdown = _lockdown()
    if lockdown is not None:
        return NotPermittedError(
            path,
            f"the kernel is locked down ({lockdown})",
            "boot it without lockdown, or name a dump instead",
        )
    if os.geteuid() != 0:
        return NotPermittedError(path, "permission denied", "run as root")
    if _may_read_raw():
        return NotPermittedError(
            path,
            "permission denied, even to root",
            "see if lockdown or a security module (LSM) of the kernel denies it",
        )
    return NotPermittedError(
        path,
        "permission denied, even to root",
        "run outside of the container, with CAP_SYS_RAWIO",
    )


def _lockdown() -> str | None:
    """Return the lockdown mode of the running kernel if it denies /proc/kcore.

    The mode ``integrity`` allows it: LOCKDOWN_KCORE comes after LOCKDOWN_INTEGRITY_MAX
    in enum lockdown_reason (include/linux/security.h).
    """
    try:
        with open(_LOCKDOWN, encoding="ascii") as file:
            modes = file.read()
    except OSError:
        return None
    # The current mode is in brackets: "none integrity [confidentiality]".
    mode = modes.partition("[")[2].partition("]")[0]
    return mode if mode == "confidentiality" else None


def _may_read_raw() -> bool:
    """Return whether this process has the capability that /proc/kcore requires."""
    try:
        with open(f"{_PROC}/self/status", encoding="ascii", errors="replace") as file:
            lines = [line for line in file if line.startswith("CapEff:")]
    except OSError:
        return False
    return any(int(line.split()[1], 16) >> _CAP_SYS_RAWIO & 1 for line in lines)


# --- Kdumps with pages that libkdumpfile must not read, or does not find.
#
# libkdumpfile maps the file and trusts the descriptors of pages, so that one page that
# is not in the file ends the process by SIGBUS; its walks of page tables may read such
# a page, too. It does not find the pages in QEMU's kdumps of arm64, and does not open a
# flattened kdump without its end. So libkdumpfile opens such a dump for its headers and
# notes only: all pages are read here, and drgn walks the page tables.


_PREFER_DRGN = "DRGN_PREFER_PGTABLE_READER"
"""Environment variable that makes drgn, not libkdumpfile, translate addresses."""

_ALL_MEMORY = (1 << 64) - 1

_PAGES_KEPT = 1024

_PAGES = "msatools pages of a kdump"

_EXCLUDED = "Excluded page"
"""libkdumpfile's error for a page that was left out of the dump."""


def set_kdump_read_here(prog: Program, path: str, reason: str) -> None:
    """Set the core dump of a program so that libkdumpfile reads none of its pages.

    :param reason: Why libkdumpfile must not read the pages, for the error's text.
    :raises DamagedDumpError: if only libkdumpfile can read the pages
    """
    _set(prog, path, path, reason)


def set_flat_headers(prog: Program, path: str) -> None:
    """Set the core dump of a program to a flattened kdump without its end.

    libkdumpfile gets a copy of the kdump's headers and bitmaps only.

    :raises DamagedDumpError: if only libkdumpfile can read its pages
    """
    # The program closes the descriptor.
    _set(prog, path, formats.take(path), "its last part is cut off")


def set_parts(prog: Program, path: str, parts: Sequence[str]) -> None:
    """Set the core dump of a program to the parts of a split dump.

    libkdumpfile gets one of them, as all have the headers.

    :param parts: Paths of the parts that have pages, by page frame.
    :raises DamagedDumpError: if only libkdumpfile can read their pages
    """
    _set(prog, path, path, "it is split into several files", parts)


def pages_read_here(prog: Program) -> AnyPages | None:
    """Return the pages of a dump that one of these functions set; else ``None``."""
    found: AnyPages | None = prog.cache.get(_PAGES)
    return found


def _set(
    prog: Program, path: str, core: str | int, reason: str, parts: Sequence[str] = ()
) -> None:
    try:
        pages = SplitPages(parts) if parts else KdumpPages(path)
    except (DamagedDataError, LeftToDrgnError, EOFError) as error:
        if isinstance(core, int):
            os.close(core)
        raise DamagedDumpError(
            path,
            f"{reason}, and {error}",
            "copy the dump again, or install msatools[fast]",
        ) from error
    with _preferring_drgn():
        ask(prog.set_core_dump, core)
    prog.add_memory_segment(0, _ALL_MEMORY, _PageReader(pages), True)
    prog.cache[_PAGES] = pages


@contextmanager
def _preferring_drgn() -> Iterator[None]:
    before = os.environ.get(_PREFER_DRGN)
    os.environ[_PREFER_DRGN] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PREFER_DRGN]
        else:
            os.environ[_PREFER_DRGN] = before


class _PageReader:
    """Reads physical memory for drgn."""

    def __init__(self, pages: AnyPages) -> None:
        self._pages = pages
        self._kept: dict[int, bytes | None] = {}

    def __call__(self, address: int, count: int, offset: int, physical: bool) -> bytes:
        """Read as :meth:`drgn.Program.add_memory_segment` describes it.

        :raises FaultError: if a page is not in the dump, or damaged
        """
        size = self._pages.page_size
        first, last = address // size, (address + count - 1) // size
        self._keep(range(first, last + 1))
        parts = []
        for pfn in range(first, last + 1):
            page = self._kept[pfn]
            if not page:
                kept = self._pages.is_kept(pfn)
                why = (
                    "damaged page, or beyond the end of the file" if kept else _EXCLUDED
                )
                raise FaultError(why, max(address, pfn * size))
            parts.append(page)
        start = address - first * size
        return b"".join(parts)[start : start + count]

    def _keep(self, pfns: range) -> None:
        missing = [pfn for pfn in pfns if pfn not in self._kept]
        if not missing:
            return
        if len(self._kept) + len(missing) > _PAGES_KEPT:
            self._kept.clear()
            missing = list(pfns)
        pages = self._pages.read(np.array(missing, np.int64))
        self._kept.update(zip(missing, pages, strict=True))
