# SPDX-License-Identifier: LGPL-2.1-or-later

"""Debug info of the kernel proper: find it, and check that it is of the same build."""

import os
import re

from drgn import Program

from msatools.errors import LOST, DamagedDataError
from msatools.selfdesc import main_module
from msatools.selfdesc.find import find_variable
from msatools.target import elf
from msatools.target.dumpfile import check_is_file, os_error
from msatools.target.errors import NoTypesError, TargetError, WrongBuildError
from msatools.target.reading import reader_of

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

    The kernel's release is part of the paths that drgn tries. One that is more than the
    name of a file would lead it to any place that a dump names.

    :param debuginfod: Whether it may be fetched from the network.
    :return: Whether it was found.
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
            return elf.build_id(read, elf.parse(read))
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
