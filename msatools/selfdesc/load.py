# SPDX-License-Identifier: LGPL-2.1-or-later

"""Load a program's types and symbols from the kernel itself."""

from drgn import (
    FaultError,
    MainModule,
    Program,
    ProgramFlags,
    SymbolIndex,
)

from msatools.selfdesc.btf import MAX_BYTES, Btf, BtfError
from msatools.selfdesc.finders import NAME, Finders, finders_of, has_debug_info
from msatools.selfdesc.kallsyms import NoSymbolsError, load_symbols
from msatools.selfdesc.types import BtfTypes

_SYS_BTF = "/sys/kernel/btf/vmlinux"
_PLACES = (
    ("__start_BTF", "__stop_BTF"),
    # Before "bpf: Support llvm-objcopy for vmlinux BTF" (in v5.7).
    ("_binary__btf_vmlinux_bin_start", "_binary__btf_vmlinux_bin_end"),
)


class NotSelfDescribedError(LookupError):
    """The kernel does not carry what describes it, or it cannot be read."""


def load_btf(prog: Program, *, modules: bool = True) -> None:
    """Take types and symbols of the kernel proper from its own BTF and kallsyms.

    They serve what no debug info does: as soon as some is loaded for the kernel, it
    takes their place. Loading twice does nothing. A name that the kernel has, but of
    which nothing tells for sure what it is, raises LookupError, also from
    ``name in prog``.

    :param modules: whether to make modules known, see :func:`create_modules`
    :raises NotSelfDescribedError: if the kernel has no BTF or no symbols, with what is
        missing in words; whether or not it has debug info
    """
    if NAME not in prog.registered_type_finders():
        _load_kernel(prog)
    if modules:
        create_modules(prog)


def create_modules(prog: Program) -> None:
    """Let drgn know the loaded modules.

    Without that it unwinds stacks that lead through them by guessing. It works with
    debug info and without; what cannot be read of the list is left out.
    """
    try:
        prog.create_loaded_modules()
    except (FaultError, LookupError):
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
        # Without it, drgn unwinds stacks by guessing.
        main.address_ranges = [_range(prog, symbols)]
    Finders(main, BtfTypes(prog, btf), symbols).register(prog)


def is_served_by_btf(prog: Program) -> bool:
    """Return whether types of the kernel proper come from BTF, ours or drgn's own."""
    return not has_debug_info(main_module(prog))


def modules_with_btf(prog: Program) -> list[str]:
    """Name the modules of which types were asked for, and found in their own BTF."""
    if NAME not in prog.cache:
        return []
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
    for names in _PLACES:
        start, stop = (_address(prog, symbols, name) for name in names)
        if start is not None and stop is not None and start != stop:
            break
    else:
        raise NotSelfDescribedError(
            "the kernel has no BTF (it was built without CONFIG_DEBUG_INFO_BTF)"
        )
    if not 0 < stop - start <= MAX_BYTES:
        raise NotSelfDescribedError(
            "the kernel's BTF cannot be used: it ends too far away"
        )
    try:
        data: bytes = prog.read(start, stop - start)
    except FaultError as error:
        raise NotSelfDescribedError(
            f"the kernel's BTF cannot be read: {error}"
        ) from error
    return data


def _range(prog: Program, symbols: SymbolIndex) -> tuple[int, int]:
    """Return where the kernel lies, from its start to its end."""
    start, end = (_address(prog, symbols, name) for name in ("_text", "_end"))
    if start is None or end is None or not start < end:
        raise NotSelfDescribedError("the kernel's symbols do not say where it lies")
    return start, end


def _address(prog: Program, symbols: SymbolIndex, name: str) -> int | None:
    found = symbols(prog, name, None, True)
    return found[0].address if found else None
