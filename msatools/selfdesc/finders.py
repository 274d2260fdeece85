# SPDX-License-Identifier: LGPL-2.1-or-later

"""Answer drgn's questions for types, objects and symbols without any debug info."""

from collections.abc import Iterator
from contextlib import contextmanager

from drgn import (
    FindObjectFlags,
    MainModule,
    ModuleFileStatus,
    Object,
    Program,
    Symbol,
    SymbolIndex,
    Type,
    TypeKindSet,
)

from msatools.selfdesc.btf import BtfError
from msatools.selfdesc.modules import Modules
from msatools.selfdesc.objects import Objects
from msatools.selfdesc.types import BtfTypes

NAME = "msatools.btf"
"""What the finders are registered as, with drgn."""

_REFUSALS = (LookupError, BtfError)
"""What is raised where something is there, and nothing tells for sure what it is."""


class Finders:
    """What serves one program for as long as its kernel has no debug info.

    Two sources for one kernel would make two types of each, which do not mix. So when
    debug info is loaded later, all look-ups from then on are left to it.
    """

    def __init__(self, main: MainModule, types: BtfTypes, symbols: SymbolIndex) -> None:
        self.main = main
        self.types = types
        self.symbols = symbols
        self.objects = Objects(types.prog, types, symbols)
        self.modules = Modules(types)
        self._witnesses: list[dict[str, str]] = []

    def register(self, prog: Program) -> None:
        """Set them behind all finders that the program has."""
        prog.cache[NAME] = self
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
        """Find a type of the kernel proper, or of the module that is named as its file.

        :raises LookupError: if several types of the name differ
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

        :raises LookupError: if it is there, but nothing tells for sure what it is
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
        if address is None or self._has(address):
            found += self.symbols(prog, name, address, one)
        if not found or (not one and address is None):
            found += self.modules.find_symbols(name, address, one)
        return found

    @contextmanager
    def refusals(self) -> Iterator[dict[str, str]]:
        """Learn what is refused meanwhile: names, and why.

        Much code takes a look-up that fails to mean that the kernel does not have the
        thing, which is not what a refusal says.
        """
        refused: dict[str, str] = {}
        self._witnesses.append(refused)
        try:
            yield refused
        finally:
            # By identity: two that are empty are equal.
            self._witnesses = [it for it in self._witnesses if it is not refused]

    def _refuse(self, name: str, error: Exception) -> None:
        for refused in self._witnesses:
            refused[name] = str(error)

    def _has(self, address: int) -> bool:
        """Return whether the kernel lies there.

        The symbols of per-CPU variables may not be addresses but offsets from zero
        on: without this, small numbers would have names.
        """
        ranges = self.main.address_ranges or ()
        return any(start <= address < end for start, end in ranges)


@contextmanager
def refusals(prog: Program) -> Iterator[dict[str, str]]:
    """Learn which names are refused meanwhile and why; none with debug info."""
    finders: Finders | None = prog.cache.get(NAME)
    if finders is None:
        yield {}
        return
    with finders.refusals() as refused:
        yield refused


def finders_of(prog: Program) -> Finders:
    """Return what was registered with a program.

    :raises LookupError: if nothing was
    """
    found: Finders = prog.cache[NAME]
    return found


def has_debug_info(main: MainModule) -> bool:
    """Return whether debug info of the kernel proper is loaded."""
    return bool(main.debug_file_status == ModuleFileStatus.HAVE)
