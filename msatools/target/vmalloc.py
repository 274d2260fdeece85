# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads of vmalloc() memory in a dump, with each page table read once.

Kernel stacks and modules lie in vmalloc() memory. drgn walks four or five tables for
each read; in a dump they do not change, so tables are cached here. The same tables
translate other mappings, such as the memmap, many pages at a time.
"""

from drgn import FaultError, Program, ProgramFlags
from drgn.helpers.linux.mm import follow_phys

from msatools.errors import LOST, UNREADABLE, MissingError, NotSupportedError
from msatools.selfdesc.find import ask, find_variable
from msatools.selfdesc.vmcoreinfo import hex_number, vmcoreinfo
from msatools.target.arch import arch_of, table_format
from msatools.target.paging import TableFormat, TableWalk


def map_vmalloc(prog: Program) -> bool:
    """
    Let drgn read vmalloc() memory and modules of a dump with cached page tables.

    It must be called before :func:`msatools.target.linear.map_linear`, whose segments
    take precedence.

    :return: Whether the format of this kernel's tables is known.
    """
    tables = page_tables(prog)
    if tables is None:
        return False
    for start, size in arch_of(prog).paged(prog, tables.form):
        prog.add_memory_segment(start, size, tables.read)
    return True


def page_tables(prog: Program) -> "VmallocTables | None":
    """Return the kernel's page tables; ``None`` if they are not found."""
    form = table_format(prog)
    if form is None or prog.flags & ProgramFlags.IS_LIVE:
        return None
    root = vmcoreinfo(prog).get("SYMBOL(swapper_pg_dir)")
    offset = arch_of(prog).image_offset(prog)
    if root is None or offset is None:
        return None
    try:
        address = hex_number(root)
        tables = VmallocTables(prog, address - offset, form)
        # Check the address from VMCOREINFO against drgn's own translation.
        expected = _by_drgn(prog, address)
        if expected is None:
            expected = address - offset
        is_right = tables.translate(address)[0] == expected
    except LOST:
        return None
    return tables if is_right else None


def physical_address(prog: Program, address: int) -> int:
    """Translate an address of the kernel, each time with a walk of page tables.

    :raises FaultError: if it is not mapped, or a page table cannot be read
    :raises MissingError: if the page tables are not found
    """
    physical = _by_drgn(prog, address)
    if physical is None:
        tables = page_tables(prog)
        if tables is None:
            raise MissingError("this architecture's page tables are not read")
        physical = tables.translate(address)[0]
    return physical


def _by_drgn(prog: Program, address: int) -> int | None:
    """Translate an address; ``None`` if drgn does not know the architecture."""
    space = find_variable(prog, "init_mm").address_of_()
    try:
        return int(ask(follow_phys, space, address).value_())
    except NotSupportedError:
        return None


class VmallocTables(TableWalk):
    """The kernel's page tables, and reads through them."""

    def __init__(self, prog: Program, root: int, form: TableFormat) -> None:
        """
        :param root: Physical address of the top-level table.
        """
        size = form.table_bytes
        super().__init__(form, root, lambda table: prog.read(table, size, True))
        self._read = prog.read

    def read(self, address: int, count: int, offset: int, physical: bool) -> bytes:
        """Read memory, with one read for pages that are physically contiguous."""
        parts: list[bytes] = []
        end = address + count
        while address < end:
            start, room = self.translate(address)
            size = min(room, end - address)
            while address + size < end:
                following, room = self._following(address + size)
                if following != start + size:
                    break
                size = min(size + room, end - address)
            try:
                parts.append(self._read(start, size, True))
            except UNREADABLE as error:
                raise FaultError(str(error), address) from error
            address += size
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def translate(self, address: int) -> tuple[int, int]:
        """
        Translate an address as :meth:`find` does.

        :raises FaultError: if nothing is mapped there
        """
        found = self.find(address)
        if found is None:
            raise FaultError("address is not mapped", address)
        return found

    def _following(self, address: int) -> tuple[int, int]:
        try:
            return self.find(address) or (-1, 0)
        except UNREADABLE:
            return -1, 0
