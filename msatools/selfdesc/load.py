# SPDX-License-Identifier: LGPL-2.1-or-later

"""Loading of a program's types and symbols from the kernel itself."""

from drgn import (
    MainModule,
    Program,
    ProgramFlags,
)

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.selfdesc.btf import MAX_BYTES, Btf, BtfError
from msatools.selfdesc.find import ask
from msatools.selfdesc.finders import Finders, finders_of, has_debug_info
from msatools.selfdesc.kallsyms import NoSymbolsError, load_symbols
from msatools.selfdesc.symbol_table import Symbols, lost_symbols
from msatools.selfdesc.types import BtfTypes
from msatools.standby import NAME

_SYS_BTF = "/sys/kernel/btf/vmlinux"
_BTF_SYMBOLS = (
    ("__start_BTF", "__stop_BTF"),
    # Before "bpf: Support llvm-objcopy for vmlinux BTF" (in v5.7).
    ("_binary__btf_vmlinux_bin_start", "_binary__btf_vmlinux_bin_end"),
)


class NotSelfDescribedError(MissingError):
    """The kernel lacks BTF or symbols, or they cannot be read."""


def load_btf(prog: Program, *, modules: bool = True) -> None:
    """Load types and symbols of the kernel proper from its own BTF and kallsyms.

    Debug info, once loaded for the kernel, replaces them. Loading twice does nothing. A
    name that the kernel has, but whose type or value is not certain, raises
    LookupError, also from ``name in prog``.

    :param modules: Whether to call :func:`create_modules`.
    :raises NotSelfDescribedError: if the kernel has no BTF or no symbols, even if debug
        info is loaded; the text names what is missing
    """
    if NAME not in prog.cache:
        _load_kernel(prog)
    if modules:
        create_modules(prog)


def create_modules(prog: Program) -> None:
    """Create drgn's modules for the loaded modules.

    Without them drgn guesses when it unwinds stacks through modules. It works with and
    without debug info; a part of the list that cannot be read is left out.
    """
    try:
        ask(prog.create_loaded_modules)
    except LOST:
        return


def _load_kernel(prog: Program) -> None:
    try:
        symbols = load_symbols(prog)
        btf = Btf(_read_btf(prog, symbols))
    except NoSymbolsError as error:
        raise NotSelfDescribedError(str(error)) from error
    except BtfError as error:
        raise NotSelfDescribedError(
            f"the kernel's BTF cannot be used: {error}"
        ) from error
    main = main_module(prog)
    if main.address_ranges is None:
        # Without it, drgn guesses when it unwinds stacks.
        main.address_ranges = [_range(prog, symbols)]
    Finders(main, BtfTypes(prog, btf), symbols).register(prog)


def is_served_by_btf(prog: Program) -> bool:
    """Return whether types of the kernel proper come from BTF, by us or by drgn."""
    return not has_debug_info(main_module(prog))


def modules_with_btf(prog: Program) -> list[str]:
    """Return the names of the modules whose types were looked up and found in BTF."""
    if NAME not in prog.cache:
        return []
    return finders_of(prog).modules.with_types()


def count_lost_symbols(prog: Program) -> int:
    """Return how many of the kernel's symbols were lost with pages of their table."""
    return lost_symbols(finders_of(prog).symbols) if NAME in prog.cache else 0


def main_module(prog: Program) -> MainModule:
    """Return drgn's module for the kernel proper; create it if needed."""
    try:
        return ask(prog.main_module)
    except MissingError:
        # drgn creates modules lazily, the kernel proper first.
        next(iter(prog.loaded_modules()))
        return ask(prog.main_module)


def _read_btf(prog: Program, symbols: Symbols) -> bytes:
    if prog.flags & ProgramFlags.IS_LIVE and prog.flags & ProgramFlags.IS_LOCAL:
        try:
            with open(_SYS_BTF, "rb") as file:
                return file.read()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise NotSelfDescribedError(f"{_SYS_BTF}: {error.strerror}") from error
    for names in _BTF_SYMBOLS:
        start, stop = (_address(prog, symbols, name) for name in names)
        if start is not None and stop is not None and start != stop:
            break
    else:
        lost = lost_symbols(symbols)
        raise NotSelfDescribedError(
            f"{lost:,} of the kernel's symbols are lost, and with them where its BTF is"
            if lost
            else "the kernel has no BTF (it was built without CONFIG_DEBUG_INFO_BTF)"
        )
    if not 0 < stop - start <= MAX_BYTES:
        raise NotSelfDescribedError(
            "the kernel's BTF cannot be used: it ends too far away"
        )
    try:
        data: bytes = prog.read(start, stop - start)
    except UNREADABLE as error:
        raise NotSelfDescribedError(
            f"the kernel's BTF cannot be read: {error}"
        ) from error
    return data


def _range(prog: Program, symbols: Symbols) -> tuple[int, int]:
    """Return start and end of the kernel's image."""
    start, end = (_address(prog, symbols, name) for name in ("_text", "_end"))
    if start is None or end is None or not start < end:
        raise NotSelfDescribedError("the kernel's symbols do not say where it lies")
    return start, end


def _address(prog: Program, symbols: Symbols, name: str) -> int | None:
    found = symbols(prog, name, None, True)
    return found[0].address if found else None
