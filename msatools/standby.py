# SPDX-License-Identifier: LGPL-2.1-or-later

"""Types for drgn's own session, loaded only if drgn finds no debug info.

The plugin puts a :class:`Standby` behind drgn's finders before drgn looks for debug
info; :func:`msatools.selfdesc.load_btf` lets it serve. This module is imported with
every session on a kernel, and imports nothing that takes time.
"""

import logging
import os
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from drgn import (
    FindObjectFlags,
    Module,
    ModuleFileStatus,
    Object,
    Program,
    Symbol,
    Type,
    TypeKindSet,
)

NAME = "msatools.btf"
"""Name of the finders in drgn; in the program's cache, the key of those that serve."""

_KEY = "msatools.standby"
_MODULES_NAME = "msatools.modules"

_SWITCH = "MSATOOLS_TYPES"
"""Environment variable: with ``never``, sessions of drgn get no types from here."""

_logger = logging.getLogger("drgn")


class Answers(Protocol):
    """Finders with the arguments that drgn calls them with."""

    def find_type(
        self, prog: Program, kinds: TypeKindSet, name: str, filename: str | None
    ) -> Type | None:
        """Find a type."""

    def find_object(
        self, prog: Program, name: str, flags: FindObjectFlags, filename: str | None
    ) -> Object | None:
        """Find a constant, function or variable."""

    def find_symbols(
        self, prog: Program, name: str | None, address: int | None, one: bool
    ) -> list[Symbol]:
        """Find symbols."""


class Standby:
    """The finders of one program, which load types and symbols when first needed.

    drgn's order is: the hook of plugins, then the search for debug info, for which it
    asks for ``struct module``, loads what it finds, and asks again. So this waits until
    drgn has searched: types found earlier would be in use beside those of DWARF.

    It keeps no program, which holds on to files and sockets.

    :param load: Loads types and symbols, and calls :meth:`serve`; returns the line that
        reports it to the user.
    """

    def __init__(self, load: Callable[[Program], str]) -> None:
        self._load: Callable[[Program], str] | None = load
        self._serving: Answers | None = None
        self._was_asked_by_drgn = False

    def register(self, prog: Program) -> None:
        """Register the finders behind all others of the program."""
        prog.cache[_KEY] = self
        prog.register_type_finder(NAME, self.find_type, enable_index=-1)
        prog.register_object_finder(NAME, self.find_object, enable_index=-1)
        prog.register_symbol_finder(NAME, self.find_symbols, enable_index=-1)
        # First, to spare hundreds of modules a search in files, and on the network.
        prog.register_debug_info_finder(
            _MODULES_NAME, self._leave_modules, enable_index=0
        )
        prog.register_debug_info_finder(NAME, self._after_search, enable_index=-1)

    def serve(self, answers: Answers) -> None:
        """Answer from now on with *answers*."""
        self._load = None
        self._serving = answers

    def stand_down(self) -> None:
        """Load nothing unless asked to serve."""
        self._load = None

    def find_type(
        self, prog: Program, kinds: TypeKindSet, name: str, filename: str | None
    ) -> Type | None:
        """Find a type; ``None`` while drgn has not searched for debug info."""
        if self._load is not None and name == "module" and _may_search(prog):
            # drgn asks first, searches, and asks again: answer only every second time.
            self._was_asked_by_drgn = not self._was_asked_by_drgn
            if self._was_asked_by_drgn:
                return None
        answers = self._answers(prog)
        return answers and answers.find_type(prog, kinds, name, filename)

    def find_object(
        self, prog: Program, name: str, flags: FindObjectFlags, filename: str | None
    ) -> Object | None:
        """Find a constant, function or variable."""
        answers = self._answers(prog)
        return answers and answers.find_object(prog, name, flags, filename)

    def find_symbols(
        self, prog: Program, name: str | None, address: int | None, one: bool
    ) -> list[Symbol]:
        """Find symbols."""
        answers = self._answers(prog)
        return answers.find_symbols(prog, name, address, one) if answers else []

    def _answers(self, prog: Program) -> Answers | None:
        if self._load is not None and not _has_debug_info(prog):
            self._activate(prog)
        return self._serving

    def _after_search(self, modules: list[Module]) -> None:
        """Serve if drgn's search for the kernel's debug info found none."""
        for module in modules:
            if _is_kernel(module) and module.wants_debug_file():
                self._activate(module.prog)
                if self._serving is not None:
                    # So drgn does not warn; a later request makes it WANT again.
                    module.debug_file_status = ModuleFileStatus.DONT_WANT

    def _leave_modules(self, modules: list[Module]) -> None:
        """Keep drgn from searching for debug info of modules while this serves."""
        if self._serving is None or _has_debug_info(modules[0].prog):
            return
        for module in modules:
            if not _is_kernel(module):
                module.debug_file_status = ModuleFileStatus.DONT_WANT

    def _activate(self, prog: Program) -> None:
        """Load types and symbols once; an error becomes one line of warning."""
        load, self._load = self._load, None
        if load is None:
            return
        try:
            line = load(prog)
        except Exception as error:
            why = str(error) or type(error).__name__
            line = f"no debug info is loaded, nor the kernel's own types: {why}"
            _logger.debug("%s", traceback.format_exc())
        _logger.warning("msatools: %s", line)


def stand_by(prog: Program, load: Callable[[Program], str]) -> None:
    """Register a :class:`Standby` for a program, unless the environment forbids it."""
    if os.environ.get(_SWITCH) != "never" and _KEY not in prog.cache:
        Standby(load).register(prog)


def standby_of(prog: Program) -> Standby | None:
    """Return the standby of a program; ``None`` if it has none."""
    found: Standby | None = prog.cache.get(_KEY)
    return found


def _main(prog: Program) -> Any:
    try:
        return prog.main_module()
    except LookupError:
        return None


def _is_kernel(module: Module) -> bool:
    return bool(module == _main(module.prog))


def _has_debug_info(prog: Program) -> bool:
    main = _main(prog)
    return main is not None and main.debug_file_status == ModuleFileStatus.HAVE


def _may_search(prog: Program) -> bool:
    """Return whether drgn may still search for the kernel's debug info."""
    main = _main(prog)
    return main is not None and main.debug_file_status in (
        ModuleFileStatus.WANT,
        ModuleFileStatus.DONT_WANT,
    )
