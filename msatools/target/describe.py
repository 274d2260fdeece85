# SPDX-License-Identifier: LGPL-2.1-or-later

"""Say what a program is, whoever opened it."""

from collections.abc import Iterator

from drgn import ModuleFileStatus, Program, ProgramFlags

from msatools.selfdesc import (
    BtfError,
    NotSelfDescribedError,
    is_served_by_btf,
    load_btf,
    main_module,
    modules_with_btf,
)
from msatools.target.crash import crash_of
from msatools.target.debuginfo import release_of
from msatools.target.dumpfile import DumpFile, read_dump_file
from msatools.target.errors import (
    NotADumpError,
    NoTypesError,
    TargetError,
    damaged_types,
)
from msatools.target.model import Kind, Source, Target


def describe(prog: Program) -> Target:
    """Describe a program that drgn's prompt or another tool opened.

    Where nothing serves its types, its own BTF is made to.

    :raises NotADumpError: if it is not a kernel
    :raises NoTypesError: if it has no types loaded, nor BTF
    """
    if not prog.flags & ProgramFlags.IS_LINUX_KERNEL:
        raise NotADumpError("prog", "not a Linux kernel", "open a kernel or its dump")
    path = prog.core_dump_path or "qmp"
    dump = None
    if not prog.flags & ProgramFlags.IS_LIVE:
        try:
            dump = read_dump_file(path)
        except TargetError:
            # The file may have been moved since, or opened by another user.
            dump = None
    try:
        _check_types(prog, path)
        return describe_opened(prog, path, dump)
    except BtfError as error:
        raise damaged_types(path, error) from error


def describe_opened(prog: Program, path: str, dump: DumpFile | None) -> Target:
    """Describe a program of which it is known what it was opened from.

    :param path: what to call it
    :param dump: what the dump's headers say, ``None`` where there are none
    """
    assert prog.platform is not None
    sources = tuple(_sources(prog))
    page_size: int = prog["PAGE_SIZE"].value_()
    return Target(
        path=path,
        kind=_kind(prog, dump),
        live=bool(prog.flags & ProgramFlags.IS_LIVE),
        release=release_of(prog),
        arch=prog.platform.arch.name.lower(),
        page_size=page_size,
        types=sources[0].types,
        dump_level=dump.dump_level if dump else None,
        truncated=dump.truncated if dump else False,
        crash=crash_of(prog),
        format=dump.format if dump else "",
        sources=sources,
    )


def _kind(prog: Program, dump: DumpFile | None) -> Kind:
    if dump is not None:
        return dump.kind
    if not prog.flags & ProgramFlags.IS_LIVE:
        return "elf"
    return "kcore" if prog.flags & ProgramFlags.IS_LOCAL else "qmp"


def _sources(prog: Program) -> Iterator[Source]:
    """Tell what serves each module that has types, the kernel proper first."""
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
    """Tell whether anything else serves the kernel's types, a plugin perhaps."""
    try:
        prog.type("struct page")
    except LookupError:
        return False
    return True
