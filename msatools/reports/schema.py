# SPDX-License-Identifier: LGPL-2.1-or-later

"""Describes models as JSON Schemas, with the meanings of keys."""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cache
from importlib import import_module
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from msatools.model import is_model, keys, marks, names
from msatools.program.model import Address

# --- Meanings of JSON keys that are the same wherever they occur, for the JSON Schemas.
#
# A field with a docstring of its own is described by that instead.


MEANINGS: Mapping[str, str] = {
    # tasks
    "pid": "ID of the task: of a process, or of one thread (TID).",
    "tgid": "PID of the thread's process.",
    "ppid": "PID of the parent process.",
    "comm": "Name of the task. It comes from the dump and can be any text.",
    "parent_comm": "Name of the parent process.",
    "uid": "User ID.",
    "uids": "User IDs.",
    "cgroup": "Path of the control group.",
    "kthread": "Whether it is a kernel thread.",
    "class": "What the task is doing: a class of msa-prstat's column NOW, such as LCK.",
    "class_age_ns": "Time for which the task has been in its class.",
    "age_ns": "Time for which the task has been in its state.",
    "min_age_ns": "The shortest of the ages.",
    "max_age_ns": "The longest of the ages.",
    "age_bound": "Accuracy of age_ns: exact, upper (at most so long) or estimate.",
    "state": "Letter of the task state, as in /proc: one of R S D T t Z X I P.",
    "parent_state": "Letter of the parent's task state, as in /proc.",
    "nice": "Nice value, -20 to 19.",
    "nvcsw": "Number of voluntary context switches.",
    "nivcsw": "Number of involuntary context switches.",
    "min_flt": "Number of minor page faults, without I/O.",
    "maj_flt": "Number of major page faults, with I/O.",
    "processes": "Number of processes.",
    "threads": "Number of threads.",
    "size_bytes": "Virtual memory.",
    "rss_bytes": "Resident memory.",
    "user_ns": "CPU time in user mode.",
    "system_ns": "CPU time in the kernel.",
    "latency_ns": "Time on a run queue without the CPU.",
    "off_cpu_ns": "Time in which the task did not run and was not runnable.",
    "zombie_ns": "Time from its end until it is reaped.",
    "lifetime_ns": "Time since its start: the sum of its times.",
    "stopped_ns": "Time stopped by a signal or a tracer.",
    "tracer": "ID of the task that traces it.",
    # memory
    "pages": "Number of pages.",
    "bytes": "Number of bytes.",
    "pfn": "Number of the first page frame.",
    "order": "Size of a block: two to this power pages.",
    "blocks": "Number of blocks.",
    "node": "Number of the NUMA node.",
    "zone": "Name of the zone.",
    "zones": "Names of the zones.",
    "delta_bytes": "Change in bytes.",
    "after_pages": "Pages in the second report; null if it has no such class or group.",
    # locks
    "lock": "ID of the lock, as in the list of locks.",
    "type": "Type of the lock.",
    "confidence": "How well this is known.",
    "waiters": "Number of tasks that wait.",
    # common
    "name": "Name.",
    "text": "One line for people.",
    "inode": "Number of the inode.",
    "cpu": "Number of the CPU.",
    "counts": "Counts by CPU.",
    "live": "Whether the kernel is running.",
    "release": "Release of the kernel, as of uname -r.",
    "arch": "Architecture, as x86_64.",
    "page_size": "Size of a page in bytes.",
    "interval_ns": "Length of the interval; null without one.",
    "before": "The first report, or the value in it.",
    "after": "The second report, or the value in it.",
    # keys whose meaning depends on the object
    "fstype": "Type of the file system.",
    "mem_cgroup": "Address of the struct mem_cgroup.",
    "kmem_cache": "Address of the struct kmem_cache.",
    "super_block": "Address of the struct super_block.",
    "slabs": "Number of slabs.",
    "areas": "Number of areas.",
    "BlockSize.bytes": "Size of one block in bytes.",
    "Blocker.name": "Name of the class of pages.",
    "Blocker.pages": "Pages of the class in the blocked blocks.",
    "BoundTask.cpus": "CPUs that the task may run on.",
    "CheckPair.after": "The check in the second snapshot; null if it lacks it.",
    "CheckPair.before": "The check in the first snapshot; null if it lacks it.",
    "Check.walk_pages": "Pages that the scan counted.",
    "ClassGroup.processes": "Number of processes with a thread in the class.",
    "ClassGroup.threads": "Number of threads in the class.",
    "ClassGroup.max_age_ns": "The longest of the threads' ages in the class.",
    "Contended.max_queue": "The largest number of waiters in a sample.",
    "Contended.mean_queue": "Mean number of waiters.",
    "Contended.name": "Name of the lock, with the object that contains it.",
    "Cpu.cpu": "Number of the CPU.",
    "Cpu.idl_ns": "Idle time.",
    "Cpu.online": "Whether the CPU is online.",
    "Cpu.smtx": "Spins on mutexes by CPU, which Linux does not count.",
    "Cpu.srw": "Spins on rwlocks by CPU, which Linux does not count.",
    "Cpu.state": "States of the CPU, several at a time.",
    "Cpu.sys_ns": "Time in the kernel, without interrupts.",
    "CpuSet.kind": "Kind of the set.",
    "Crash.comm": "Name of the task that crashed.",
    "Crash.cpu": "CPU that crashed.",
    "Crash.pid": "ID of the task that crashed.",
    "Diagnostic.cpus": "CPUs that the finding is about.",
    "Evidence.blocked_signals": "Signals that the first thread blocks, as SigBlk.",
    "Evidence.handler": "Address of the parent's handler of SIGCHLD.",
    "Evidence.ignored_signals": "Signals that the parent ignores, as SigIgn.",
    "Evidence.reaper": "Whether the parent is an init or a subreaper; null if neither.",
    "Evidence.root_pid": "ID of the task that is the root cause, if it is one.",
    "Evidence.thread_count": "Number of the parent's threads.",
    "Frag.pageblock_order": "Order of a page block.",
    "FreeList.pages": "Free pages in the zone.",
    "Heir.heir_comm": "Name of the heir.",
    "HeldMemory.bytes": "Memory that all zombies hold.",
    "Herd.kind": "Kind of the thing that they wait on, as in a wait target.",
    "Herd.address": "Address of the thing that they wait on.",
    "Herd.max_age_ns": "The longest wait.",
    "Herd.min_age_ns": "The shortest wait.",
    "Inversion.owner": "ID of the thread that holds the lock.",
    "Inversion.waiter": "ID of the more urgent thread that waits for it.",
    "Inversion.waiter_pri": "Priority of the waiter, as that of the owner.",
    "Irq.affinity": "CPUs that the interrupt may go to.",
    "Irq.chip": "Name of the interrupt controller.",
    "Irq.effective": "CPUs that the interrupt goes to now.",
    "Irq.irq": "Number of the interrupt, as in /proc/interrupts.",
    "KernelFacts.cpus_online": "Number of online CPUs.",
    "KernelFacts.cpus_possible": "Number of CPUs that there may be.",
    "KernelFacts.nodes_possible": "Number of NUMA nodes that there may be.",
    "Leak.address": "Address of the struct pid.",
    "Leak.pid": "The PID in the initial namespace.",
    "Leak.references": "The kernel's count of references.",
    "Load.uninterruptible": "Number of threads in uninterruptible sleep.",
    "LoadGroup.max_age_ns": "The longest time in the class.",
    "LoadGroup.pids": "IDs of the threads.",
    "LockChanges.ended": "Threads that were blocked at its start only.",
    "LockRow.address": "Address of the lock; null if it has none.",
    "LockRow.device": "Block device that the lock belongs to.",
    "LockRow.inode": "Inode that the lock belongs to.",
    "LockRow.path": "File that the lock belongs to.",
    "OffCpu.ns": "Time off the CPU in this class.",
    "PageBlocks.blocks": "Number of page blocks.",
    "Outline.section_pages": "Pages that a memory section spans.",
    "PageRun.cells": "Number of cells.",
    "PagesSide.physical_pages": "Pages of RAM in the machine.",
    "ParentThread.blocks_sigchld": "Whether the thread blocks SIGCHLD.",
    "Processor.core": "Number of the core in the package.",
    "Processor.die": "Number of the die in the package.",
    "Processor.package": "Number of the package (socket).",
    "Processor.tick_stopped": "Whether its tick is stopped.",
    "Root.blocked_s": "Number of other tasks that wait for it.",
    "RowChange.change": "Whether the row is new, gone or has changed.",
    "RowChange.key": "Values that identify the row in both reports.",
    "RunQueue.clock_ns": "The run queue's own clock.",
    "RunnableTask.wait_bound": "Accuracy of wait_ns.",
    "SelfCheck.allowed_least": "The least difference that is allowed.",
    "SelfCheck.left": "The one side of the comparison, in words.",
    "SelfCheck.left_value": "The one number; null if it could not be read.",
    "SelfCheck.right_value": "The other number; null if it could not be read.",
    "SelfCheck.verdict": "Whether the two agree.",
    "Section.nr": "Number of the section.",
    "Software.drgn": "Version of drgn.",
    "Software.msatools": "Version of msatools.",
    "Software.python": "Version of Python.",
    "StackGroup.pids": "IDs of the threads.",
    "StateTime.family": "Whose state it is: Gelato's or Solaris's.",
    "StateTime.name": "Name of the state.",
    "Target.kind": "What it was read from.",
    "Totals.ram_bytes": "Memory of the machine.",
    "UnattributedGroup.gfp_mask": "Flags of the allocation (gfp_t).",
    "Vector.text": "Description, as in /proc/interrupts.",
    "VmallocCaller.caller": "The kernel function that allocated them.",
    "WaitTarget.fd": "Number of the file descriptor.",
    "WaitTarget.inode": "Number of the inode of a file without a path.",
    "WaitTarget.local": "Local address of a socket.",
    "WaitTarget.peer": "Remote address of a socket.",
    "Waiting.kind": "Whether it waits for any child, one, or a process group.",
    "Why.field": "Name of the column.",
    "Zombie.age_ns": "Time since its end.",
    "Zombie.verdict": "Why the zombie is not reaped.",
    "ZombieGroup.cgroups": "Paths of their control groups.",
    "ZombieGroup.count": "Number of zombies.",
    "ZombieGroup.namespaces": "Inode numbers of their PID namespaces.",
    "ZombieGroup.pids": "PIDs of the zombies.",
    "ZombieGroup.verdict": "Why they are not reaped.",
    "MemstatReport.by": "Pages by owner: one list for each --by that was requested.",
    "MemstatReport.map": "Physical memory in order, from --map.",
    "CpusReport.softirqs": "Softirqs.",
    "CpusReport.vectors": "Interrupts of the architecture.",
}
"""Maps a JSON key, or a class and a key, to its description."""


# --- Describes models as JSON Schemas: the form in which --json prints them.
#
# The keys are described by the docstrings of the fields, which are read from the
# source: this is for make schema and for tests, not for commands.


DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]

_PLAIN: dict[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    NoneType: "null",
}


def schema_of(model: type[Any], name: str, what: str) -> Schema:
    """Return the schema of a document.

    :param model: Class of the document.
    :param name: Name and version, such as ``msatools.memstat/1``.
    :param what: The command that prints it, for the title.
    """
    return _Schema().document(model, name, what)


class _Schema:
    """One schema, and the definitions that it refers to."""

    def __init__(self) -> None:
        self._definitions: dict[str, Schema] = {}

    def document(self, model: type[Any], name: str, what: str) -> Schema:
        body = self._object(model)
        schema = {"const": name, "description": "Name and version of this schema."}
        return {
            "$schema": DIALECT,
            "title": f"{name}: {what}",
            "description": body["description"],
            "type": "object",
            "properties": {"schema": schema, **body["properties"]},
            "required": ["schema", *body["required"]],
            "$defs": dict(sorted(self._definitions.items())),
        }

    def _object(self, model: type[Any]) -> Schema:
        """Return the schema of a model."""
        hints = get_type_hints(model, localns=_typing_names(model))
        docs = field_docs(model)
        properties: Schema = {}
        required = []
        marked = marks(model)
        for name, key in zip(names(model), keys(model), strict=True):
            if marked[name].get("unlisted"):
                continue
            is_added = bool(marked[name].get("added"))
            if not is_added:
                required.append(key)
            described = self._property(marked[name], hints[name], is_added)
            text = docs.get(name) or self._meaning(model, key, described)
            if text and is_added:
                text = text.replace("null", "absent")
            properties[key] = {**described, **({"description": text} if text else {})}
        return {
            "description": plain_text(inspect.getdoc(model) or ""),
            "type": "object",
            "properties": properties,
            "required": required,
        }

    def _meaning(self, model: type[Any], key: str, described: Schema) -> str | None:
        """Return the meaning of a key whose field has no docstring."""
        own = f"{model.__name__}.{key}"
        if own in MEANINGS:
            return MEANINGS[own]
        # Values of a class are described by the docstring of that class.
        for name in _references(described):
            return str(self._definitions[name]["description"])
        return MEANINGS.get(key)

    def _property(self, marked: Mapping[str, Any], hint: Any, is_added: bool) -> Schema:
        """Return the schema of a field.

        :param marked: Marks of the field, by name.
        :param is_added: Whether the key is missing where the value is ``None``.
        """
        if (form := marked.get("form")) is not None:
            hint = get_type_hints(form, localns=_typing_names(form))["return"]
        if (groups := marked.get("groups")) is not None:
            by_key = {
                key: {"type": "array", "items": self._value(row)}
                for key, row in groups().items()
            }
            described: Schema = {"type": "object", "properties": by_key}
            return described if is_added else _any_of([described, {"type": "null"}])
        if is_added:
            hint = _without_none(hint)
        return self._value(hint)

    def _value(self, hint: Any) -> Schema:
        """Return the schema of a type."""
        if hint is Any:
            return {}
        if hint is Address:
            return {"type": "string", "pattern": "^0x(0|[1-9a-f][0-9a-f]*)$"}
        if hint in _PLAIN:
            return {"type": _PLAIN[hint]}
        origin, words = get_origin(hint), get_args(hint)
        if origin is Literal:
            return {"enum": [*words]}
        if origin in (Union, UnionType):
            return _any_of([self._value(word) for word in words])
        if is_model(hint):
            return {"$ref": f"#/$defs/{self._defined(hint)}"}
        kind = origin or hint
        if isinstance(kind, type) and issubclass(kind, Mapping):
            return self._mapping(*words)
        if isinstance(kind, type) and issubclass(kind, (Sequence, Set)):
            return self._list(kind, words)
        if isinstance(kind, type) and issubclass(kind, (str, int)):
            base = str if issubclass(kind, str) else int
            return {"type": _PLAIN[base]}
        raise TypeError(f"no JSON has a {hint}")

    def _mapping(self, key: Any, item: Any) -> Schema:
        described = {"type": "object", "additionalProperties": self._value(item)}
        if key is int:
            described["propertyNames"] = {"pattern": "^-?[0-9]+$"}
        elif get_origin(key) is Literal:
            described["propertyNames"] = {"enum": [*get_args(key)]}
        return described

    def _list(self, kind: type, words: tuple[Any, ...]) -> Schema:
        if issubclass(kind, tuple) and words[1:] != (...,):
            raise TypeError("a list in JSON has items of one kind")
        return {"type": "array", "items": self._value(words[0])}

    def _defined(self, model: Any) -> str:
        """Define a model, and return its name."""
        name: str = model.__name__
        if name not in self._definitions:
            self._definitions[name] = {}  # a model may contain itself
            self._definitions[name] = self._object(model)
        return name


def _references(described: Schema) -> Iterator[str]:
    """Yield the names of the definitions that a schema or its items refer to."""
    if "$ref" in described:
        yield described["$ref"].rpartition("/")[2]
    if "items" in described:
        yield from _references(described["items"])
    for part in described.get("anyOf", ()):
        yield from _references(part)


def _any_of(schemas: Sequence[Schema]) -> Schema:
    """Return the schema of values that match any of *schemas*."""
    if all([*schema] == ["type"] for schema in schemas):
        return {"type": [schema["type"] for schema in schemas]}
    return {"anyOf": [*schemas]}


def _without_none(hint: Any) -> Any:
    rest = [word for word in get_args(hint) if word is not NoneType]
    if get_origin(hint) not in (Union, UnionType):
        return hint
    return Union[tuple(rest)]  # noqa: UP007 - their number is not known


# --- docstrings


def field_docs(model: type[Any]) -> dict[str, str]:
    """Return the docstrings of the fields of a model, with those it inherits."""
    docs: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if is_model(each) and names(each):
            docs |= _own_docs(each)
    return docs


@cache
def _own_docs(model: Any) -> dict[str, str]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(node, ast.ClassDef)
    return dict(_docs(node.body))


def _docs(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield names and docstrings of fields; one docstring may follow several fields."""
    names: list[str] = []
    for statement in body:
        if isinstance(statement, ast.AnnAssign):
            assert isinstance(statement.target, ast.Name)
            names.append(statement.target.id)
        elif (
            names
            and isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
        ):
            yield names[-1], plain_text(str(statement.value.value))
            names = []


_ROLE = re.compile(r":\w+:`~?\.?([^`]+)`")
_MARKUP: tuple[tuple[re.Pattern[str], str | Callable[["re.Match[str]"], str]], ...] = (
    (_ROLE, lambda found: found[1].rpartition(".")[2]),
    (re.compile(r"``None``"), "null"),
    (re.compile(r"``([^`]*)``"), r"\1"),
    (re.compile(r"(?<!\w)\*(\w+)\*(?!\w)"), r"\1"),
    (re.compile(r"\s+"), " "),
)


def plain_text(doc: str) -> str:
    """Return a docstring in one line, without markup; ``None`` is null in JSON."""
    for pattern, by in _MARKUP:
        doc = pattern.sub(by, doc)
    return doc.strip()


# --- names that only type checkers import


def _typing_names(thing: Any) -> dict[str, Any]:
    """Map the names that the modules of a class import ``if TYPE_CHECKING``."""
    modules = {each.__module__ for each in getattr(thing, "__mro__", (thing,))}
    found: dict[str, Any] = {}
    for module in modules:
        if module.startswith("msatools."):
            found |= _names_of_module(module)
    return found


@cache
def _names_of_module(module: str) -> dict[str, Any]:
    source = inspect.getsource(sys.modules[module])
    return {
        alias.asname or alias.name: getattr(import_module(node.module), alias.name)
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
