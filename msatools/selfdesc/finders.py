# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finders of types, objects and symbols for drgn, without debug info."""

from collections.abc import Iterator
from contextlib import contextmanager

from drgn import (
    FindObjectFlags,
    MainModule,
    ModuleFileStatus,
    Object,
    Program,
    Symbol,
    Type,
    TypeKindSet,
)

from msatools.errors import UncertainNameError
from msatools.selfdesc.btf import BtfError
from msatools.selfdesc.modules import Modules
from msatools.selfdesc.objects import Objects
from msatools.selfdesc.symbol_table import Symbols
from msatools.selfdesc.types import BtfTypes
from msatools.standby import NAME, standby_of

_REFUSALS = (UncertainNameError, BtfError)
"""Errors for something that exists, but whose type is not certain."""


class Finders:
    """The finders of one program, in use while its kernel has no debug info.

    With two sources there would be two distinct types of each name. So once debug info
    is loaded, all lookups are left to it.
    """

    def __init__(self, main: MainModule, types: BtfTypes, symbols: Symbols) -> None:
        self.main = main
        self.types = types
        self.symbols = symbols
        self.objects = Objects(types.prog, types, symbols)
        self.modules = Modules(types)
        self._records: list[dict[str, str]] = []

    def register(self, prog: Program) -> None:
        """Register them after all finders of the program."""
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
        """Record the names that are refused meanwhile, and why.

        Much code takes a failed lookup to mean that the kernel lacks the name, which a
        refusal does not mean.
        """
        refused: dict[str, str] = {}
        self._records.append(refused)
        try:
            yield refused
        finally:
            # Compare by identity, as two empty ones are equal.
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
    """Record the names that are refused meanwhile, and why; none with debug info."""
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
