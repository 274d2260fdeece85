# SPDX-License-Identifier: LGPL-2.1-or-later

"""Have a program's types and symbols come from the kernel itself."""

from drgn import (
    FaultError,
    MainModule,
    Program,
    ProgramFlags,
    SymbolIndex,
)

from msatools.selfdesc.btf import Btf, BtfError
from msatools.selfdesc.finders import NAME, Finders, finders_of, has_debug_info
from msatools.selfdesc.kallsyms import NoSymbolsError, load_symbols
from msatools.selfdesc.types import BtfTypes

_SYS_BTF = "/sys/kernel/btf/vmlinux"
_MAX_BTF_BYTES = 1 << 28
"""Far more than any kernel has (a Debian 6.12 has 4.7 million)."""


class NotSelfDescribedError(LookupError):
    """The kernel does not carry what describes it, or it cannot be read."""


def load_btf(prog: Program) -> None:
    """Take types and symbols of the kernel proper from its own BTF and kallsyms.

    They serve what no debug info does: as soon as some is loaded for the kernel, it
    takes their place. Loading twice does nothing.

    :raises NotSelfDescribedError: if the kernel has no BTF or no symbols, with what is
        missing in words
    """
    if NAME in prog.registered_type_finders():
        return
    try:
        symbols = load_symbols(prog)
        btf = Btf(_read_btf(prog, symbols))
    except NoSymbolsError as error:
        raise NotSelfDescribedError(str(error)) from error
    except BtfError as error:
        raise NotSelfDescribedError(f"the kernel's BTF is damaged: {error}") from error
    main = main_module(prog)
    _set_range(prog, main, symbols)
    Finders(main, BtfTypes(prog, btf), symbols).register(prog)


def is_served_by_btf(prog: Program) -> bool:
    """Tell whether types of the kernel proper come from BTF."""
    return NAME in prog.enabled_type_finders() and not has_debug_info(main_module(prog))


def modules_with_btf(prog: Program) -> list[str]:
    """Name the modules of which types were asked for, and found in their own BTF."""
    return finders_of(prog).modules.with_types()


def main_module(prog: Program) -> MainModule:
    """Find the module that the kernel proper is to drgn, and make it if need be."""
    try:
        return prog.main_module()
    except LookupError:
        # drgn makes modules as it is asked for them, the kernel proper first.
        next(iter(prog.loaded_modules()))
        return prog.main_module()


def _read_btf(prog: Program, symbols: SymbolIndex) -> bytes:
    if prog.flags & ProgramFlags.IS_LIVE and prog.flags & ProgramFlags.IS_LOCAL:
        try:
            with open(_SYS_BTF, "rb") as file:
                return file.read()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise NotSelfDescribedError(f"{_SYS_BTF}: {error.strerror}") from error
    start = _address(prog, symbols, "__start_BTF")
    stop = _address(prog, symbols, "__stop_BTF")
    if start is None or stop is None or start == stop:
        raise NotSelfDescribedError(
            "the kernel has no BTF (it was built without CONFIG_DEBUG_INFO_BTF)"
        )
    if not 0 < stop - start <= _MAX_BTF_BYTES:
        raise NotSelfDescribedError("the kernel's BTF is damaged: it ends too far away")
    try:
        data: bytes = prog.read(start, stop - start)
    except FaultError as error:
        raise NotSelfDescribedError(
            f"the kernel's BTF cannot be read: {error}"
        ) from error
    return data


def _set_range(prog: Program, main: MainModule, symbols: SymbolIndex) -> None:
    """Say where the kernel lies: without that, drgn unwinds stacks by guessing."""
    start, end = (_address(prog, symbols, name) for name in ("_text", "_end"))
    if main.address_ranges is None and start is not None and end is not None:
        main.address_ranges = [(start, end)]


def _address(prog: Program, symbols: SymbolIndex, name: str) -> int | None:
    found = symbols(prog, name, None, True)
    return found[0].address if found else None
