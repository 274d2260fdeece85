# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders the report of msa-whatis."""

from collections.abc import Iterator

from msatools.render.blocks import Block, Span, cut_line, plural
from msatools.render.header import header, notes
from msatools.whatis.model import AddressAnswer, LockThere, Page, WhatisReport
from msatools.whatis.words import (
    area_text,
    mappers_text,
    page_text,
    percpu_text,
    stack_text,
    symbol_text,
)

_INDENT = 2
_LABEL = 9


def whatis_blocks(report: WhatisReport, *, verbose: bool) -> Iterator[Block]:
    """Yield the blocks of a report.

    :param verbose: Whether to show flags and reference counts of pages.
    """
    yield from header(report.target, verbose=verbose)
    for answer in report.answers:
        yield cut_line(Span(_title(answer), "title"), f"  {answer.text}")
        for label, text in _details(answer, verbose):
            yield cut_line(f"{'':{_INDENT}}{label:{_LABEL}}{text}")
        if answer.lock is not None and answer.user is not None:
            yield cut_line(f"{'':{_INDENT}}{'lock':{_LABEL}}{answer.lock}")
    for lock in report.locks:
        yield cut_line(Span(lock.id, "title"), f"  {_lock_text(lock)}")
    yield from notes(report)


def _title(answer: AddressAnswer) -> str:
    """Return the requested address, and its value if it was written otherwise."""
    if answer.address is None:
        return answer.asked
    shown = f"{answer.address:#x}"
    if answer.user is not None:
        return f"{answer.user.pid}:{shown}"
    plain = answer.asked.strip("[]<>(),;:").lower()
    is_same = plain in (shown, shown[2:])
    return shown if is_same else f"{answer.asked} = {shown}"


def _details(answer: AddressAnswer, verbose: bool) -> Iterator[tuple[str, str]]:
    """Yield labels and texts of further facts; ``answer.text`` has the main one."""
    facts = _facts(answer)
    shown = {"page": "page_struct"}.get(answer.kind, answer.kind)
    for name, label, text in facts:
        if name != shown:
            yield label, text
    if answer.page is not None:
        yield from _page(answer, answer.page, verbose)
    if answer.readable is False and not _is_empty(answer):
        yield "content", "not in the dump"


def _is_empty(answer: AddressAnswer) -> bool:
    """Return whether no memory is mapped at an address, or the address is unknown."""
    if answer.kind in ("unmapped", "unknown"):
        return True
    in_guard = answer.stack is not None and answer.stack.where == "guard"
    return in_guard or (answer.vmalloc is not None and answer.vmalloc.guard)


def _facts(answer: AddressAnswer) -> Iterator[tuple[str, str, str]]:
    """Yield the parts of an answer, the most specific first: kind, label, text."""
    if answer.stack is not None:
        yield "stack", "stack", stack_text(answer.stack)
    if answer.task is not None:
        task = answer.task
        text = f"{task.pid} ({task.comm}), task_struct {task.address:#x}"
        yield "task", "task", text
    if answer.percpu is not None:
        place = answer.percpu
        yield "percpu", "per-CPU", percpu_text(place)
    if answer.slab is not None:
        slab = answer.slab
        names = ", ".join(slab.merged_names) or f"{slab.merged} more caches"
        text = f"{slab.cache}, object {slab.object:#x} of {slab.bytes:,} bytes"
        text += f"; as {names}" if slab.merged else ""
        if slab.points_to:
            text += f"; points to {', '.join(slab.points_to)}"
        yield "slab-object", "slab", text
    if answer.symbol is not None:
        yield "symbol", "symbol", symbol_text(answer.symbol)
    if answer.vmalloc is not None:
        area = answer.vmalloc
        text = f"{area.start:#x}, {area.bytes:,} bytes, {area_text(area)}"
        yield "area", "vmalloc", text


def _page(
    answer: AddressAnswer, page: Page, verbose: bool
) -> Iterator[tuple[str, str]]:
    text = f"pfn {page.pfn:#x}, {page.page_class}"
    if page.order:
        text += f", order {page.order}"
    if page.node is not None:
        text += f", node {page.node}"
    is_said = answer.kind in ("page", "memory") or answer.symbol or answer.slab
    if page.owner and not is_said:
        text += f": {page_text(page)}"
    yield "page", text
    if page.cgroup is not None:
        yield "cgroup", page.cgroup
    if page.file is not None:
        where = page.file.device or page.file.fstype
        yield "file", f"{page.file.name}, inode {page.file.inode} on {where}"
        if page.mappers:
            yield "mappers", mappers_text(page.mappers)
    if verbose:
        yield "flags", ", ".join(page.flags) or "none"
        if page.references is not None:
            yield "refcount", f"{page.references:,}"


def _lock_text(lock: LockThere) -> str:
    owners = ", ".join(
        f"{'' if owner.confidence == 'exact' else '~'}{owner.pid} ({owner.comm})"
        for owner in lock.owners
    )
    words = [f"owner {owners or '-'}"]
    if lock.readers is not None:
        words.append(plural(lock.readers, "reader"))
    if lock.waiters is None:
        words.append("waiters not known")
    else:
        pids = ", ".join(map(str, lock.waiters[:16]))
        words.append(
            plural(len(lock.waiters), "waiter") + (f": {pids}" if pids else "")
        )
    return ", ".join(words)
