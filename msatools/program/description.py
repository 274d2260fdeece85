# SPDX-License-Identifier: LGPL-2.1-or-later

"""Descriptions of opened programs: the crash, the kernel's log, and its debug info.

Debug info of the kernel proper is found here, and checked to be of the same build.
"""

import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import drgn
import numpy as np
import numpy.typing as npt
from drgn import ModuleFileStatus, Object, Program, ProgramFlags
from drgn.helpers.linux.printk import get_printk_records
from drgn.helpers.linux.sched import cpu_curr
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.program import formats
from msatools.program.dumpfile import (
    DumpFile,
    check_is_file,
    os_error,
    read_dump_file,
    remembered_dump,
)
from msatools.program.formats import reader_of
from msatools.program.model import (
    Crash,
    Kind,
    NotADumpError,
    NoTypesError,
    Source,
    Target,
    TargetError,
    WrongBuildError,
    damaged_types,
    losses_refused,
)
from msatools.selfdesc import (
    BtfError,
    NotSelfDescribedError,
    count_lost_symbols,
    is_served_by_btf,
    load_btf,
    main_module,
    modules_with_btf,
)
from msatools.selfdesc.find import ask, find_type, find_variable, member_of, offset_of

# --- Debug info of the kernel proper: find it, and check that it is of the same build.


_DEBUGINFOD = "debuginfod"

_RELEASE = re.compile(r"(?!\.\.?$)[A-Za-z0-9._+~-]+", re.ASCII)
"""A release that is safe in paths: no slash, no dots alone."""


def load_named(prog: Program, vmlinux: str) -> None:
    """Load debug info of the kernel proper from the file that the user named.

    drgn silently ignores a file of another build, and accepts any file if the dump
    holds no build ID (before Linux 5.9): both are caught here.

    :raises WrongBuildError: if the file is of another build
    :raises NoTypesError: if it holds no debug info
    :raises TargetError: if it is not an ELF file, or cannot be read
    """
    main = main_module(prog)
    expected, found = main.build_id, _read_build_id(vmlinux)
    if expected and found != expected:
        raise _wrong_build(vmlinux, prog, expected, found)
    try:
        main.try_file(vmlinux)
    except Exception as error:
        raise TargetError(vmlinux, str(error), "name an intact vmlinux") from error
    if main.wants_debug_file():
        raise NoTypesError(
            vmlinux, "it holds no debug info", "name the vmlinux from the debug package"
        )
    if not expected and not _is_banner_in_place(prog):
        raise _wrong_build(vmlinux, prog, None, None)


def load_found(prog: Program, *, debuginfod: bool) -> bool:
    """Load the debug info that drgn finds for the kernel proper.

    That of modules is not loaded: searching for hundreds of them is slow, and no report
    needs their types.

    The kernel's release is part of the paths that drgn tries. With a slash in it, a
    damaged or hostile dump could make drgn open any file: then nothing is loaded.

    :param debuginfod: Whether debug info may be fetched from the network.
    :return: Whether debug info was found.
    """
    if not _RELEASE.fullmatch(release_of(prog)):
        return False
    finders = [f for f in prog.enabled_debug_info_finders() if f != _DEBUGINFOD]
    if debuginfod:
        _check_debuginfod(prog)
        finders.append(_DEBUGINFOD)
    prog.set_enabled_debug_info_finders(finders)
    main = main_module(prog)
    prog.load_module_debug_info(main)
    return not main.wants_debug_file()


def how_to_get(prog: Program) -> str:
    """Return advice on how to get debug info of the kernel proper."""
    return (
        f"install it (Debian: linux-image-{release_of(prog)}-dbg, elsewhere the "
        "kernel's debuginfo package) or name its vmlinux with -s"
    )


def release_of(prog: Program) -> str:
    """Return the kernel's release from VMCOREINFO."""
    release: bytes = find_variable(prog, "UTS_RELEASE").string_()
    return release.decode("ascii", "backslashreplace")


def _read_build_id(path: str) -> bytes | None:
    try:
        check_is_file(path, os.stat(path))
        with open(path, "rb", buffering=0) as file:
            read = reader_of(file.fileno())
            return formats.build_id(read, formats.parse_elf(read))
    except OSError as error:
        raise os_error(path, error) from error
    except (EOFError, DamagedDataError) as error:
        raise TargetError(
            path, str(error), "name the kernel's vmlinux, an ELF file with debug info"
        ) from error


def _is_banner_in_place(prog: Program) -> bool:
    """Return whether the kernel's banner is at the address given by the debug info."""
    try:
        banner: bytes = find_variable(prog, "linux_banner").string_()
    except LOST:
        return False
    return banner.startswith(f"Linux version {release_of(prog)} ".encode())


def _wrong_build(
    path: str, prog: Program, expected: bytes | None, found: bytes | None
) -> WrongBuildError:
    ids = ""
    if expected:
        has = found.hex() if found else "none"
        ids = f" (build ID {expected.hex()}, the file's: {has})"
    return WrongBuildError(
        path,
        f"of another build than the target's {release_of(prog)}{ids}",
        "name the vmlinux of exactly this build",
    )


def _check_debuginfod(prog: Program) -> None:
    if _DEBUGINFOD not in prog.registered_debug_info_finders():
        raise TargetError(
            "--debuginfod", "this drgn cannot do it", "install drgn with debuginfod"
        )
    if not os.environ.get("DEBUGINFOD_URLS"):
        raise TargetError(
            "--debuginfod", "no server is named", "set DEBUGINFOD_URLS to your server"
        )


# --- The kernel's log (kernel/printk/printk_ringbuffer.c), read in bulk.
#
# drgn's helper takes several reads for a record, and its walk of a damaged ring has no
# bound. The caller passes the function that reads memory, as the crash is described
# before a Reader exists.


Read = Callable[[int, int], tuple[bytes | bytearray, list[range]]]
"""``read(address, size)`` returns bytes, zero in gaps, and the gaps: ranges of offsets,
ascending."""

_MAX_BITS = 26
"""Maximum log2 of the bytes of the ring that is read. CONFIG_LOG_BUF_SHIFT is 25 at
most; log_buf_len= allows 2 GiB (LOG_BUF_LEN_MAX), too much for a damaged size."""

_MAX_RECORD_BITS = _MAX_BITS - 5
"""Maximum log2 of the number of records: one for 32 bytes of text (PRB_AVGBITS)."""

_WORD = 8
_KEPT = (1, 2)
"""Members of enum desc_state, in the upper two bits of ``state_var``: committed and
finalized."""

_STATE_SHIFT = 62
_ID = (1 << _STATE_SHIFT) - 1
_IS_CPU = 1 << 31
"""Flag of ``caller_id``: it is a CPU, else the ID of a thread."""

_INFO = {
    "seq": ("sequence", "<u8"),
    "ts_nsec": ("time", "<u8"),
    "text_len": ("length", "<u2"),
    "facility": ("facility", "u1"),
    "caller_id": ("caller", "<u4"),
}


OPENED_TEXT = "msatools log text"
"""Key in ``prog.cache`` of the log that was opened as a text; such a program has no
memory."""


class LogRecord(Struct, frozen=True):
    """One message of the kernel's log."""

    time_ns: int
    """Time by the local clock of the CPU (local_clock())."""

    level: int
    """0 (emergency) to 7 (debug)."""

    text: str
    """The message, which may have several lines; bytes other than UTF-8 are escaped."""

    tid: int | None
    """The thread that wrote the message; ``None`` outside of threads."""

    cpu: int | None
    """The CPU that wrote the message outside of threads, else ``None``."""

    facility: int = 0
    """As in syslog(3): 0 is the kernel."""

    sequence: int = 0
    """Number of the message since the kernel started; 0 if unknown."""

    line: int = 0
    """Number of the message's line in a text, from 1; 0 if the log was in memory."""

    when: str | None = None
    """Time of the message as a text writes it, if that is not the time since boot;
    empty if the text has no time."""

    @property
    def is_kernel(self) -> bool:
        """Whether the kernel itself wrote the message.

        Messages that programs write to /dev/kmsg never have facility 0
        (kernel/printk/printk.c, devkmsg_write()).
        """
        return self.facility == 0


def log_records(
    prog: drgn.Program, read: Read, lose: Callable[[int], None]
) -> Iterator[LogRecord]:
    """Yield the messages in the kernel's log, the oldest first.

    :param lose: Called with each number of messages that cannot be read.
    :raises MissingError: if the kernel has no such log, as before v5.10
    :raises drgn.FaultError: if the ring's descriptor or its text cannot be read
    """
    ring = find_variable(prog, "prb").read_()
    descs, texts = ring.desc_ring, ring.text_data_ring
    count = 1 << _bits(descs.count_bits, ring, _MAX_RECORD_BITS)
    size = 1 << _bits(texts.size_bits, ring, _MAX_BITS)
    first = descs.tail_id.counter.value_() & _ID
    last = descs.head_id.counter.value_() & _ID
    used = min((last - first & _ID) + 1, count)
    rows = _Ring(read, count, last - used + 1, used, lose)
    state, begin, next_ = _descriptors(rows, descs)
    infos, level_bit = _infos(rows, descs)
    ids = np.arange(last - used + 1, last + 1).astype(np.uint64) & np.uint64(_ID)
    kept = (state & np.uint64(_ID) == ids) & np.isin(state >> _STATE_SHIFT, _KEPT)
    kept &= begin % np.uint64(_WORD) == 0  # else it has no text (BLK0_LPOS)
    if not kept.any():
        return
    start_of_all = int(begin[kept][0])
    length = min(max(int(next_[kept][-1]) - start_of_all, 0), size)
    texts_read = _Ring(read, size, start_of_all, length, lose)
    data, gaps = texts_read.read(texts.data.value_(), 1)
    lost, room = 0, size
    for row in np.flatnonzero(kept).tolist():
        info, start, end = infos[row], int(begin[row]), int(next_[row])
        if start % size > end % size:
            start = end - end % size  # a wrapped block is at the ring's start, whole
        start += _WORD - start_of_all
        end -= start_of_all
        end = min(start + int(info["length"]), end)
        # *room* ends damage where texts overlap. Sound texts need not be in the order
        # of their messages: another CPU may come between (prb_reserve()).
        is_there = 0 <= start <= end <= len(data) and end - start <= room
        if not is_there or _overlaps(gaps, start, end):
            lost += 1
            continue
        room -= end - start
        caller, sequence = int(info["caller"]), int(info["sequence"])
        yield LogRecord(
            time_ns=int(info["time"]),
            # The number modulo the ring's size is the record's index (prb_reserve()).
            sequence=0 if (sequence - int(ids[row])) % count else sequence,
            level=int(info["flags"]) >> level_bit & 7,
            text=bytes(data[start:end]).decode("utf-8", "backslashreplace"),
            tid=None if caller & _IS_CPU else caller,
            cpu=caller & ~_IS_CPU if caller & _IS_CPU else None,
            facility=int(info["facility"]),
        )
    lose(lost)


def _overlaps(gaps: list[range], start: int, end: int) -> bool:
    index = bisect_right(gaps, start, key=lambda gap: gap.stop)
    return index < len(gaps) and gaps[index].start < end


class _Ring(Struct, frozen=True):
    """The part in use of a ring buffer's array."""

    read_memory: Read
    count: int
    """Number of elements of the array."""

    first: int
    """Number of the first element in use, modulo :attr:`count`."""

    used: int
    lose: Callable[[int], None]

    def read(self, address: int, size: int) -> tuple[bytes, list[range]]:
        """
        Read the elements in use.

        :param size: Bytes of an element.
        :return: The bytes, zero in the gaps, and the gaps.
        """
        start = self.first % self.count
        whole = min(self.used, self.count - start)
        data, gaps = b"", list[range]()
        for row, rows in ((start, whole), (0, self.used - whole)):
            part, missing = self.read_memory(address + row * size, rows * size)
            at = len(data)
            gaps += (range(at + gap.start, at + gap.stop) for gap in missing)
            data += part
        return data, gaps

    def records(self, address: int, record: np.dtype[Any]) -> npt.NDArray[Any]:
        """Read the elements in use; those that cannot be read are zero."""
        data, gaps = self.read(address, record.itemsize)
        self.lose(sum(-(-len(gap) // record.itemsize) for gap in gaps))
        return np.frombuffer(data, record)


def _bits(member: drgn.Object, ring: drgn.Object, most: int) -> int:
    bits = int(member.value_())
    if not 0 < bits <= most:
        raise DamagedDataError("no size of a log", ring.address_ or 0)
    return bits


def _descriptors(ring: _Ring, descs: drgn.Object) -> tuple[npt.NDArray[np.uint64], ...]:
    """Read each descriptor's state, and the positions of its text's start and end."""
    type_ = find_type(descs.prog_, "struct prb_desc")
    members = {
        "state": "state_var.counter",
        "begin": "text_blk_lpos.begin",
        "next": "text_blk_lpos.next",
    }
    fields = {name: (_offset(type_, at), "<u8") for name, at in members.items()}
    rows = ring.records(descs.descs.value_(), _dtype(fields, type_))
    return rows["state"], rows["begin"], rows["next"]


def _infos(ring: _Ring, descs: drgn.Object) -> tuple[npt.NDArray[Any], int]:
    """Read each ``struct printk_info``; return the level's bit in ``flags``, too."""
    type_ = find_type(descs.prog_, "struct printk_info")
    fields = {
        name: (_offset(type_, member), format_)
        for member, (name, format_) in _INFO.items()
    }
    bit = int(member_of(type_, "level").bit_offset)
    fields["flags"] = (bit // 8, "u1")
    return ring.records(descs.infos.value_(), _dtype(fields, type_)), bit % 8


def _offset(type_: drgn.Type, member: str) -> int:
    return int(offset_of(type_, member))


def _dtype(fields: dict[str, tuple[int, str]], type_: drgn.Type) -> np.dtype[Any]:
    return np.dtype(
        {
            "names": list(fields),
            "formats": [format_ for _, format_ in fields.values()],
            "offsets": [at for at, _ in fields.values()],
            "itemsize": drgn.sizeof(type_),
        }
    )


# --- Descriptions of opened programs, and of the crash of their kernel.


_TORN = "msatools.torn"
"""Key in ``prog.cache`` of the number of contradictions (:mod:`.torn`)."""

_PANIC = re.compile(r"Kernel panic - ")

_FAULTS = (
    re.compile(
        r"BUG: (kernel NULL pointer|unable to handle|(\S+ )?stack guard page)|"
        r"Unable to handle kernel|Insufficient stack space"
    ),
    re.compile(r"kernel BUG at "),
    re.compile(r"Oops: |general protection fault|Internal error: "),
)
"""Starts of lines about faults, the most specific first: with a capture kernel, a fault
need not lead to a line of panic()."""


def describe(prog: Program) -> Target:
    """Describe a program opened by drgn's prompt or another tool.

    If its types are not loaded, load its own BTF.

    :raises TypeError: if *prog* is no program
    :raises NotADumpError: if the program is not of a kernel
    :raises NoTypesError: if it has neither types loaded nor BTF
    """
    if not isinstance(prog, Program):
        raise TypeError(
            f"prog must be a drgn.Program, such as prog at drgn's prompt or "
            f"msatools.open(FILE).prog, not {type(prog).__name__}"
        )
    if not prog.flags & ProgramFlags.IS_LINUX_KERNEL:
        raise NotADumpError("prog", "not a Linux kernel", "open a kernel or its dump")
    path = prog.core_dump_path or "qmp"
    dump = None
    if (remembered := remembered_dump(prog)) is not None:
        path, dump = remembered
    elif not prog.flags & ProgramFlags.IS_LIVE:
        try:
            dump = read_dump_file(path)
        except TargetError:
            # The file may have been moved since, or opened by another user.
            dump = None
    with losses_refused(path, live=bool(prog.flags & ProgramFlags.IS_LIVE)):
        try:
            _check_types(prog, path)
            return describe_opened(prog, path, dump)
        except BtfError as error:
            raise damaged_types(path, error) from error


def describe_opened(prog: Program, path: str, dump: DumpFile | None) -> Target:
    """Describe a program opened from a known target.

    :param path: The name of the target.
    :param dump: Headers of the dump; ``None`` if the target is not a dump.
    """
    assert prog.platform is not None
    sources = tuple(_sources(prog))
    page_size: int = find_variable(prog, "PAGE_SIZE").value_()
    lacks_parts = dump is not None and dump.missing_pfns is not None
    return Target(
        path=path,
        kind=_kind(prog, dump),
        live=bool(prog.flags & ProgramFlags.IS_LIVE),
        release=release_of(prog),
        arch=prog.platform.arch.name.lower(),
        page_size=page_size,
        types=sources[0].types,
        dump_level=dump.dump_level if dump else None,
        truncated=dump.truncated or lacks_parts if dump else False,
        crash=crash_of(prog),
        format=dump.format if dump else "",
        bad_descriptors=dump.bad_descriptors if dump else 0,
        lacks_parts=lacks_parts,
        lost_symbols=count_lost_symbols(prog),
        torn=_count_torn(prog) if dump and dump.kind == "raw" else 0,
        options=dump.options if dump else (),
        sources=sources,
    )


def _count_torn(prog: Program) -> int:
    """Return the number of contradictions in a file of raw memory, counted once."""
    found: int | None = prog.cache.get(_TORN)
    if found is None:
        # Imported here, as few targets are such files.
        from msatools.program.torn import count_torn

        found = prog.cache[_TORN] = count_torn(prog)
    return found


def _kind(prog: Program, dump: DumpFile | None) -> Kind:
    if dump is not None:
        return dump.kind
    if not prog.flags & ProgramFlags.IS_LIVE:
        return "elf"
    return "kcore" if prog.flags & ProgramFlags.IS_LOCAL else "qmp"


def _sources(prog: Program) -> Iterator[Source]:
    """Yield the source of types of each module, the kernel proper first."""
    main = main_module(prog)
    if is_served_by_btf(prog):
        yield Source("kernel", "btf", None)
        for name in modules_with_btf(prog):
            yield Source(name, "btf", None)
    else:
        yield Source("kernel", "dwarf", main.debug_file_path)
    for module in prog.modules():
        if module != main and module.debug_file_status == ModuleFileStatus.HAVE:
            yield Source(module.name, "dwarf", module.debug_file_path)


def _check_types(prog: Program, path: str) -> None:
    if not is_served_by_btf(prog):
        return
    try:
        load_btf(prog, modules=False)
    except NotSelfDescribedError as error:
        if _has_types(prog):
            return
        raise NoTypesError(
            path,
            f"no types of the kernel are loaded, and {error}",
            "load its debug info, in drgn's prompt with -s",
        ) from error


def _has_types(prog: Program) -> bool:
    """Return whether the kernel's types come from elsewhere, such as a plugin."""
    try:
        find_type(prog, "struct page")
    except MissingError:
        return False
    return True


def crash_of(prog: Program) -> Crash | None:
    """Return how the kernel crashed; ``None`` if it did not, or if that is unknown.

    A running guest has crashed if it panicked and was not restarted.
    """
    if prog.flags & ProgramFlags.IS_LOCAL:
        return None
    try:
        # The CPU that went into panic() or crash_kexec(), else PANIC_CPU_INVALID, -1.
        # Since Linux kernel commit 1717f2096b54 ("panic, x86: Fix re-entrance problem
        # due to panic on NMI") (in v4.5). A guest that was dumped while it ran has -1.
        cpu: int = find_variable(prog, "panic_cpu").counter.value_()
    except LOST:
        return None
    if cpu < 0:
        return None
    task = _crashed_task(prog, cpu)
    return Crash(
        message=_panic_message(prog),
        cpu=cpu,
        pid=None if task is None else _pid(task),
        comm=None if task is None else _comm(task),
    )


def _crashed_task(prog: Program, cpu: int) -> Object | None:
    try:
        if prog.flags & ProgramFlags.IS_LIVE:
            return ask(cpu_curr, prog, cpu)
        return ask(prog.crashed_thread).object
    except LOST:
        return None


def _pid(task: Object) -> int | None:
    try:
        pid: int = task.pid.value_()
    except UNREADABLE:
        return None
    return pid


def _comm(task: Object) -> str | None:
    try:
        comm: bytes = task.comm.string_()
    except UNREADABLE:
        return None
    return comm.decode("utf-8", "backslashreplace")


def _panic_message(prog: Program) -> str | None:
    def read(address: int, size: int) -> tuple[bytes | bytearray, list[range]]:
        return ask(prog.read, address, size), []

    def lose(count: int) -> None:
        pass

    try:
        records = list(log_records(prog, read, lose))
    except UNREADABLE:
        # The log's buffer may be filtered, cut off, or damaged.
        return None
    except MissingError:
        return _panic_line(_old_messages(prog))
    return _panic_line([each.text for each in records if each.is_kernel])


def _old_messages(prog: Program) -> list[str]:
    """Return the messages of a kernel before v5.10; none if they cannot be read."""
    try:
        records = ask(get_printk_records, prog)
    except LOST:
        return []
    return [
        each.text.decode("utf-8", "backslashreplace")
        for each in records
        if each.facility == 0
    ]


def _panic_line(lines: Sequence[str]) -> str | None:
    """Return the line of the kernel's log that says why it crashed.

    drgn's panic_message() also takes what a program wrote to /dev/kmsg, and of several
    faults the first, which the kernel survived.
    """
    # The first, as a further panic is a fault in panic() itself.
    for line in lines:
        if _PANIC.match(line):
            return line
    for words in _FAULTS:
        for line in reversed(lines):
            if words.match(line):
                return line
    return None
