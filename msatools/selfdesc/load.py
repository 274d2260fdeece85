# SPDX-License-Identifier: LGPL-2.1-or-later

"""Loading of a program's types and symbols from the kernel itself, modules included.

:func:`load_btf` registers the finders that drgn calls for types, objects and symbols.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import islice
from typing import Any

import drgn
import numpy as np
import numpy.typing as npt
from drgn import (
    FindObjectFlags,
    MainModule,
    ModuleFileStatus,
    Object,
    Program,
    ProgramFlags,
    Symbol,
    SymbolIndex,
    Type,
    TypeKind,
    TypeKindSet,
)
from msgspec import Struct

from msatools.errors import (
    LOST,
    UNREADABLE,
    DamagedDataError,
    MissingError,
    UncertainNameError,
)
from msatools.selfdesc.btf import MAX_BYTES, Btf, BtfError
from msatools.selfdesc.find import (
    ask,
    ask_each,
    drgn_lookups,
    find_type,
    find_variable,
    member_of,
    offset_of,
    pointer_to,
)
from msatools.selfdesc.kallsyms import NoSymbolsError, load_symbols
from msatools.selfdesc.tables import Symbols, lost_symbols
from msatools.selfdesc.types import BtfTypes, Objects
from msatools.standby import NAME, standby_of

# --- struct module and the symbols of a loaded module.
#
# kernel/module/kallsyms.c, include/linux/module.h. The caller passes the function that
# reads memory, as types and symbols are looked up before a reader exists.


Read = Callable[[int, int], bytes]
"""``read(address, size)`` returns bytes; raises FaultError."""

_MAX_SYMBOLS = 1 << 20
"""Maximum number of symbols of a module; the largest have about ten thousand."""

_MAX_NAMES_BYTES = 1 << 26
_KSYM_NAME_LEN = 512
_PAGE = 4096

ELF64_SYM = np.dtype(
    [
        ("name", "<u4"),
        ("info", "u1"),
        ("other", "u1"),
        ("section", "<u2"),
        ("value", "<u8"),
        ("size", "<u8"),
    ]
)
"""``Elf64_Sym`` of elf.h."""

_KINDS = {kind.value: kind for kind in drgn.SymbolKind}
_BINDINGS = {
    0: drgn.SymbolBinding.LOCAL,
    1: drgn.SymbolBinding.GLOBAL,
    2: drgn.SymbolBinding.WEAK,
}


class LoadedModule(Struct, frozen=True):
    """A loaded module."""

    address: int
    """Address of its ``struct module``."""

    name: str
    regions: tuple[tuple[int, int], ...]
    """Start and end (exclusive) of each region of the module's memory."""

    def contains(self, address: int) -> bool:
        """Return whether one of its regions contains an address."""
        return any(start <= address < end for start, end in self.regions)


class ModuleLayout:
    """Layout of ``struct module``: its name, regions and list node.

    :raises MissingError: if the type is unknown
    """

    list: int
    """Offset of the node on the list of all modules."""

    size: int
    """Bytes from the start to the end of the last of these members."""

    def __init__(self, prog: drgn.Program) -> None:
        type_ = find_type(prog, "struct module")
        self.list = offset_of(type_, "list")
        self._name = _MemberSpan.of(type_, "name")
        try:
            # Linux kernel commit ac3b43283923 ("module: replace module_layout with
            # module_memory") (in v6.4)
            count = member_of(type_, "mem").type.length
            parts = [f"mem[{number}]" for number in range(count)]
        except MissingError:
            parts = ["core_layout", "init_layout"]
        self._regions = [
            (
                _MemberSpan.of(type_, f"{part}.base"),
                _MemberSpan.of(type_, f"{part}.size"),
            )
            for part in parts
        ]
        fields = [self._name, *(field for region in self._regions for field in region)]
        node = drgn.sizeof(member_of(type_, "list").type)
        self.size = max(self.list + node, *(field.end for field in fields))

    def parse(self, address: int, record: bytes) -> LoadedModule:
        """Decode a ``struct module`` from *record*, its bytes at *address*."""
        text = record[self._name.offset : self._name.end].partition(b"\0")[0]
        regions = []
        for base, size in self._regions:
            start, length = base.number(record), size.number(record)
            if length:
                regions.append((start, start + length))
        name = text.decode("utf-8", "backslashreplace")
        return LoadedModule(address, name, tuple(regions))


class _MemberSpan(Struct, frozen=True):
    offset: int
    size: int

    @classmethod
    def of(cls, type_: drgn.Type, member: str) -> "_MemberSpan":
        with drgn_lookups:
            field = drgn.Object(type_.prog, type_, address=0).subobject_(member)
        return cls(field.address_, drgn.sizeof(field.type_))

    @property
    def end(self) -> int:
        return self.offset + self.size

    def number(self, record: bytes) -> int:
        return int.from_bytes(record[self.offset : self.end], "little")


class ModuleSymbols:
    """The table of a module's symbols, read as needed.

    :raises MissingError: if the kernel keeps none (CONFIG_KALLSYMS), or their number is
        impossible
    :raises drgn.FaultError: if it cannot be read
    """

    def __init__(self, prog: drgn.Program, module: LoadedModule, read: Read) -> None:
        entry = pointer_to(prog, "struct module", module.address)
        # module.kallsyms is there since Linux kernel commit 8244062ef1e5 ("modules: fix
        # longstanding /proc/kallsyms vs module insertion race.") (in v4.5). Symbols of
        # modules of older kernels are not read.
        with drgn_lookups:
            table = entry.member_("kallsyms").read_()[0].read_()
        self._module = module
        self._read = read
        self._symbols: int = table.symtab.value_()
        self._strings: int = table.strtab.value_()
        self._count: int = table.num_symtab.value_()
        if not 0 < self._count <= _MAX_SYMBOLS:
            raise DamagedDataError(f"it has {self._count:,}")

    def index(self) -> drgn.SymbolIndex:
        """Return the symbols within the module's regions.

        :raises MissingError: if the data cannot be symbols
        :raises drgn.FaultError: if they cannot be read
        """
        symbols = self._rows(0, self._count)
        inside = np.zeros(len(symbols), np.bool_)
        for start, end in self._module.regions:
            inside |= (symbols["value"] >= start) & (symbols["value"] < end)
        symbols = symbols[inside & (symbols["name"] != 0)]
        names = self._names(int(symbols["name"].max(initial=0)))
        return drgn.SymbolIndex(_symbols(symbols.tolist(), names))

    def names(self) -> bytes:
        """Return the names of all symbols, with a NUL before and after each.

        :raises MissingError: if the data cannot be symbols
        :raises drgn.FaultError: if they cannot be read
        """
        (last,) = self._rows(self._count - 1, 1)["name"].tolist()
        return self._names(last)

    def _rows(self, first: int, count: int) -> npt.NDArray[Any]:
        size = ELF64_SYM.itemsize
        data = self._read(self._symbols + size * first, size * count)
        return np.frombuffer(data, ELF64_SYM)

    def _names(self, last: int) -> bytes:
        """Read names up to the one at offset *last*; the next page may be missing."""
        if last >= _MAX_NAMES_BYTES:
            raise DamagedDataError("a symbol has its name far away")
        size = last + _PAGE - (self._strings + last) % _PAGE
        names = self._read(self._strings, size)
        if b"\0" not in names[last:]:
            names += self._read(self._strings + size, _KSYM_NAME_LEN)
        return names


def _text(names: bytes, start: int) -> str:
    """Return the name at an offset.

    :raises DamagedDataError: if it has no end
    """
    end = names.find(b"\0", start)
    if end < 0:
        raise DamagedDataError("a symbol's name does not end")
    return names[start:end].decode(errors="backslashreplace")


def _symbols(rows: Iterable[tuple[int, ...]], names: bytes) -> Iterable[drgn.Symbol]:
    return [
        drgn.Symbol(
            _text(names, name),
            address,
            size,
            _BINDINGS.get(info >> 4, drgn.SymbolBinding.UNKNOWN),
            _KINDS.get(info & 15, drgn.SymbolKind.UNKNOWN),
        )
        for name, info, _, _, address, size in rows
    ]


# --- Symbols and types of loadable modules, from the kernel's memory.


_MAX_MODULES = 10_000
"""Maximum number of entries of a list; machines have some hundred modules."""


class Module:
    """A loaded module; its symbols are read when first needed."""

    def __init__(self, prog: Program, loaded: LoadedModule) -> None:
        self._prog = prog
        self._loaded = loaded
        self.name = loaded.name
        self.contains = loaded.contains

    def symbols(self) -> SymbolIndex:
        """Return the module's own symbols; empty if they cannot be read."""
        return self._symbols

    def may_have(self, name: str) -> bool:
        """Return whether a symbol may have this name, by the table of names alone."""
        return b"\0" + name.encode() + b"\0" in self._names

    @cached_property
    def _symbols(self) -> SymbolIndex:
        try:
            return self._table().index()
        except LOST:
            return SymbolIndex([])

    @cached_property
    def _names(self) -> bytes:
        try:
            return self._table().names()
        except LOST:
            return b""

    def _table(self) -> ModuleSymbols:
        return ModuleSymbols(self._prog, self._loaded, self._prog.read)


class Modules:
    """The loaded modules, listed when one is first needed.

    :param kernel: Types of the kernel proper, which the BTF of modules refers to.
    """

    def __init__(self, kernel: BtfTypes) -> None:
        self.prog = kernel.prog
        self.kernel = kernel
        self._modules: list[Module] | None = None
        self._types: dict[str, BtfTypes | None] = {}
        self._btf: dict[str, Object] | None = None

    def __iter__(self) -> Iterator[Module]:
        if self._modules is None:
            # Empty meanwhile, as lookups during the walk may search the modules.
            self._modules = []
            loaded: list[Module] | None = None
            try:
                loaded = list(_loaded(self.prog))
            finally:
                self._modules = loaded
        return iter(self._modules)

    def find_symbols(
        self, name: str | None, address: int | None, one: bool
    ) -> list[Symbol]:
        """Find symbols in modules, with the arguments of drgn's symbol finders."""
        found: list[Symbol] = []
        for module in self:
            if address is not None and not module.contains(address):
                continue
            if name is not None and not module.may_have(name):
                continue
            found += module.symbols()(self.prog, name, address, one)
            if found and one:
                return found[:1]
        return found

    def types(self, name: str) -> BtfTypes | None:
        """Return the types of a module's BTF; ``None`` if the module has no BTF.

        :raises BtfError: if its BTF is damaged, or refers to that of another kernel
        """
        if name not in self._types:
            self._types[name] = self._read_types(name)
        return self._types[name]

    def with_types(self) -> list[str]:
        """Return the names of the modules whose types were looked up and found."""
        return [name for name, types in self._types.items() if types]

    def with_type(self, kinds: Collection[TypeKind], name: str) -> list[str]:
        """Return the names of the modules whose BTF has a type; read all their BTF."""
        return [each for each in self._entries_of_btf() if self._has(each, kinds, name)]

    def _has(self, module: str, kinds: Collection[TypeKind], name: str) -> bool:
        try:
            types = self.types(module)
            return types is not None and types.find(kinds, name) is not None
        except (BtfError, MissingError):
            return False

    def _entries_of_btf(self) -> dict[str, Object]:
        if self._btf is None:
            self._btf = {}
            for entry in _entries(
                self.prog, "btf_modules", "struct btf_module", "list"
            ):
                with suppress(*UNREADABLE):
                    self._btf.setdefault(_name(entry.module), entry)
        return self._btf

    def _read_types(self, name: str) -> BtfTypes | None:
        entry = self._entries_of_btf().get(name)
        if entry is None:
            return None
        try:
            btf = entry.btf
            base = self.kernel.btf
            if (btf.start_id, btf.start_str_off) != (base.end_id, base.end_string):
                raise BtfError(f"module {name} has BTF for another kernel")
            size = btf.data_size.value_()
            if size > MAX_BYTES:
                raise BtfError(f"module {name} has {size} bytes of BTF")
            data = self.prog.read(btf.data, size)
        except UNREADABLE as error:
            raise BtfError(f"module {name}: {error}") from error
        return BtfTypes(self.prog, Btf(data, base), self.kernel.type)


def _loaded(prog: Program) -> Iterator[Module]:
    try:
        layout = ModuleLayout(prog)
    except MissingError:  # a kernel without loadable modules
        return
    for entry in _entries(prog, "modules", "struct module", "list"):
        address = entry.value_()
        try:
            record = prog.read(address, layout.size)
        except UNREADABLE:
            continue
        yield Module(prog, layout.parse(address, record))


def _entries(
    prog: Program, variable: str, entry_type: str, member: str
) -> Iterator[Object]:
    """Yield the entries of a list up to one that cannot be read."""
    from drgn.helpers.linux.list import list_for_each_entry

    try:
        head = find_variable(prog, variable).address_of_()
        seen: set[int] = set()
        for entry in islice(
            ask_each(list_for_each_entry, entry_type, head, member), _MAX_MODULES
        ):
            address = entry.value_()
            if address in seen:
                return
            seen.add(address)
            yield entry
    except LOST:
        return


def _name(module: Object) -> str:
    name: bytes = module.name.string_()
    return name.decode("utf-8", "backslashreplace")


# --- Finders of types, objects and symbols for drgn, without debug info.


_REFUSALS = (UncertainNameError, BtfError)
"""Errors for something that exists, but whose type is not certain."""


class Finders:
    """The finders of one program, in use while its kernel has no debug info.

    With two sources there would be two distinct types of each name. So once debug info
    is loaded, these finders find nothing.
    """

    def __init__(self, main: MainModule, types: BtfTypes, symbols: Symbols) -> None:
        self.main = main
        self.types = types
        self.symbols = symbols
        self.objects = Objects(types.prog, types, symbols)
        self.modules = Modules(types)
        self._records: list[dict[str, str]] = []

    def register(self, prog: Program) -> None:
        """Register the finders with drgn, after all finders that the program has."""
        prog.cache[NAME] = self
        standby = standby_of(prog)
        if standby is not None:
            standby.serve(self)
            return
        prog.register_type_finder(NAME, self.find_type, enable_index=-1)
        prog.register_object_finder(NAME, self.find_object, enable_index=-1)
        prog.register_symbol_finder(NAME, self.find_symbols, enable_index=-1)

    @property
    def is_serving(self) -> bool:
        """Whether the kernel still has no debug info."""
        return not has_debug_info(self.main)

    def find_type(
        self, prog: Program, kinds: TypeKindSet, name: str, filename: str | None
    ) -> Type | None:
        """Find a type of the kernel proper, or of a module, if *filename* names one.

        :raises AmbiguousError: if different types have the name
        """
        if not self.is_serving:
            return None
        if filename is None:
            try:
                return self.types.find(kinds, name)
            except _REFUSALS as error:
                self._refuse(name, error)
                raise
        module = self.modules.types(filename)
        return module.find(kinds, name) if module else None

    def find_object(
        self, prog: Program, name: str, flags: FindObjectFlags, filename: str | None
    ) -> Object | None:
        """Find a constant, function or variable of the kernel proper.

        :raises UncertainNameError: if it exists, but its type or value is not certain
        """
        if filename is not None or not self.is_serving:
            return None
        try:
            return self.objects.find(name, flags)
        except _REFUSALS as error:
            self._refuse(name, error)
            raise

    def find_symbols(
        self, prog: Program, name: str | None, address: int | None, one: bool
    ) -> list[Symbol]:
        """Find symbols of the kernel proper, and then of modules."""
        if not self.is_serving:
            return []
        found: list[Symbol] = []
        if address is None or self._contains(address):
            found += self.symbols(prog, name, address, one)
        if not found or (not one and address is None):
            found += self.modules.find_symbols(name, address, one)
        return found

    @contextmanager
    def refusals(self) -> Iterator[dict[str, str]]:
        """Record refused lookups within the context, as a dict from name to reason.

        The kernel has a refused name, but much code treats any failed lookup as if it
        lacked the name.
        """
        refused: dict[str, str] = {}
        self._records.append(refused)
        try:
            yield refused
        finally:
            # Compare by identity, as two empty dicts are equal.
            self._records = [it for it in self._records if it is not refused]

    def _refuse(self, name: str, error: Exception) -> None:
        for refused in self._records:
            refused[name] = str(error)

    def _contains(self, address: int) -> bool:
        """Return whether the kernel's image contains an address.

        The symbols of per-CPU variables may be offsets, which begin at zero, and not
        addresses: without this check small numbers would match them.
        """
        ranges = self.main.address_ranges or ()
        return any(start <= address < end for start, end in ranges)


@contextmanager
def refusals(prog: Program) -> Iterator[dict[str, str]]:
    """Record refused lookups within the context, as a dict from name to reason.

    It stays empty if types come from debug info.
    """
    finders: Finders | None = prog.cache.get(NAME)
    if finders is None:
        yield {}
        return
    with finders.refusals() as refused:
        yield refused


def finders_of(prog: Program) -> Finders:
    """Return the finders of a program.

    :raises MissingError: if none are registered
    """
    found: Finders = prog.cache[NAME]
    return found


def has_debug_info(main: MainModule) -> bool:
    """Return whether debug info of the kernel proper is loaded."""
    return bool(main.debug_file_status == ModuleFileStatus.HAVE)


# --- Loads BTF and kallsyms, and registers the finders with drgn.


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

    Without them drgn guesses when it unwinds stacks through modules. Debug info is not
    needed. Modules behind an unreadable entry of the kernel's list are left out.
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
        # Without address ranges, drgn guesses when it unwinds stacks.
        main.address_ranges = [_range(prog, symbols)]
    Finders(main, BtfTypes(prog, btf), symbols).register(prog)


def is_served_by_btf(prog: Program) -> bool:
    """Return whether the kernel's types come from BTF, read by msatools or by drgn."""
    return not has_debug_info(main_module(prog))


def modules_with_btf(prog: Program) -> list[str]:
    """Return the names of the modules whose types were looked up and found in BTF."""
    if NAME not in prog.cache:
        return []
    return finders_of(prog).modules.with_types()


def count_lost_symbols(prog: Program) -> int:
    """Return the number of kernel symbols that are lost with pages of kallsyms."""
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
    """Return the addresses of the kernel image's start and end (exclusive)."""
    start, end = (_address(prog, symbols, name) for name in ("_text", "_end"))
    if start is None or end is None or not start < end:
        raise NotSelfDescribedError("the kernel's symbols do not say where it lies")
    return start, end


def _address(prog: Program, symbols: Symbols, name: str) -> int | None:
    found = symbols(prog, name, None, True)
    return found[0].address if found else None
