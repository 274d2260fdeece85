# SPDX-License-Identifier: LGPL-2.1-or-later

"""Descriptions of opened programs, and of the crash of their kernel."""

import re
from collections.abc import Iterator, Sequence

from drgn import ModuleFileStatus, Object, Program, ProgramFlags

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.selfdesc import (
    BtfError,
    NotSelfDescribedError,
    count_lost_symbols,
    is_served_by_btf,
    load_btf,
    main_module,
    modules_with_btf,
)
from msatools.selfdesc.find import ask, find_type, find_variable
from msatools.target.debuginfo import release_of
from msatools.target.dumpfile import DumpFile, read_dump_file, remembered_dump
from msatools.target.errors import (
    NotADumpError,
    NoTypesError,
    TargetError,
    damaged_types,
    losses_refused,
)
from msatools.target.model import Crash, Kind, Source, Target
from msatools.target.printk import log_records

_TORN = "msatools.torn"
"""Key of the program's cache."""

_PANIC = re.compile(r"Kernel panic - ")

_FAULTS = (
    re.compile(
        r"BUG: (kernel NULL pointer|unable to handle|(\S+ )?stack guard page)|"
        r"Unable to handle kernel|Insufficient stack space"
    ),
    re.compile(r"kernel BUG at "),
    re.compile(r"Oops: |general protection fault|Internal error: "),
)
"""Beginnings of lines on faults, the most telling first. With a capture kernel a fault
does not come to panic()."""


def describe(prog: Program) -> Target:
    """Describe a program opened by drgn's prompt or another tool.

    If its types are not loaded, load its own BTF.

    :raises TypeError: if it is no program
    :raises NotADumpError: if it is not a kernel
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
    """Return the contradictions in memory without a dump's headers, counted once."""
    found: int | None = prog.cache.get(_TORN)
    if found is None:
        # Few targets are such files.
        from msatools.target.raw.torn import count_torn

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

    It may also be a guest that panicked and was not restarted.
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
            # The helpers are slow to import, and few targets are crashes.
            from drgn.helpers.linux.sched import cpu_curr

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
    # The helpers are slow to import, and few targets are so old.
    from drgn.helpers.linux.printk import get_printk_records

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
    # A further panic is of a fault in panic() itself.
    for line in lines:
        if _PANIC.match(line):
            return line
    for words in _FAULTS:
        for line in reversed(lines):
            if words.match(line):
                return line
    return None
