# SPDX-License-Identifier: LGPL-2.1-or-later

"""drgn's helpers for Linux, each called on real objects if its arguments are known."""

import importlib
import inspect
import io
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import islice
from typing import Any

import drgn
import drgn.helpers.linux
from drgn import Object, Program, StackTrace, Type, cast
from drgn.helpers.linux.block import for_each_disk
from drgn.helpers.linux.fs import fget
from drgn.helpers.linux.mm import for_each_vma, virt_to_page
from drgn.helpers.linux.mmzone import for_each_online_pgdat
from drgn.helpers.linux.module import for_each_module
from drgn.helpers.linux.net import for_each_netdev
from drgn.helpers.linux.pid import find_task
from drgn.helpers.linux.slab import find_slab_cache

from tests.indrgn.pairs import Pair

_MOST = 50
"""Items of an iterator that are compared; some walk all of memory."""

_ERROR = re.compile(r"\w*(?:Error|Exception): ")

Arguments = Mapping[str, Any]
"""Values by the names that drgn's helpers give to parameters."""


def arguments(prog: Program) -> Arguments:
    """Return values for parameters, of one dump."""
    task = find_task(prog, 1)
    file = fget(task, 0)
    dentry = task.fs.root.dentry
    first = next(iter(for_each_vma(task.mm)))
    page = virt_to_page(cast("void *", task))
    cache = find_slab_cache(prog, "task_struct")
    disk = next(iter(for_each_disk(prog)), None)
    found: dict[str, Any] = {
        "prog": prog,
        "task": task,
        "pid": 1,
        "cpu": 0,
        "nid": 0,
        "node": 0,
        "ns": task.nsproxy.pid_ns_for_children,
        "mm": task.mm,
        "vma": first,
        "address": first.vm_start,
        "addr": cast("void *", task),
        "page": page,
        "pfn": 256,
        "folio": page,
        "slab_cache": cache,
        "slab_cache_name": "task_struct",
        "dentry": dentry,
        "inode": dentry.d_inode,
        "path": file.f_path.address_of_(),
        "sb": dentry.d_sb,
        "fd": 0,
        "file": file,
        "mount": task.fs.root.mnt,
        "mnt": task.fs.root.mnt,
        "vfsmnt": task.fs.root.mnt,
        "mask": prog["__cpu_online_mask"].address_of_(),
        "cgrp": task.cgroups.dfl_cgrp,
        "css": task.cgroups.dfl_cgrp.self.address_of_(),
        "pgdat": next(iter(for_each_online_pgdat(prog))),
        "rq": drgn.helpers.linux.per_cpu(prog["runqueues"], 0),
        "xa": dentry.d_inode.i_mapping.i_pages.address_of_(),
        "module": next(iter(for_each_module(prog)), None),
        "mod": next(iter(for_each_module(prog)), None),
        "dev": next(iter(for_each_netdev(prog["init_net"])), None),
        "net": prog["init_net"].address_of_(),
        "disk": disk,
        "irq": 1,
        "sig": 9,
        "signum": 9,
        "user_ns": prog["init_user_ns"],
        "uid": 0,
        "name": "lo",
        "head": prog["modules"].address_of_(),
        "type": "struct module",
        "member": "list",
        "root": prog["bdi_tree"].address_of_(),
        "table": prog["arp_tbl"].address_of_(),
        "number": 0,
        "nr": 1,
        "ifindex": 1,
        "lock": task.mm.mmap_lock.address_of_() if _is_new(task) else None,
        "sigset": task.blocked.address_of_(),
        "state": prog.constant("N_ONLINE"),
        "cfs_rq": prog["root_task_group"].cfs_rq[0],
        "wq": task.signal.wait_chldexit.address_of_(),
    }
    if task.mm.type_.type.has_member("mm_mt"):
        found["mt"] = task.mm.mm_mt.address_of_()
    return found


def _is_new(task: Object) -> bool:
    return bool(task.mm.type_.type.has_member("mmap_lock"))


def helpers() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public functions of ``drgn.helpers.linux``, with ``MODULE.NAME``."""
    package = drgn.helpers.linux
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for name in getattr(module, "__all__", ()):
            function = getattr(module, name)
            if callable(function) and not inspect.isclass(function):
                yield f"{info.name}.{name}", function


def call(function: Callable[..., Any], known: Arguments) -> str | None:
    """Return what a helper returns or prints, as text; None if not called.

    An error of a helper is its text, without the traceback.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return None
    values = []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is not parameter.empty:
            break
        if (value := known.get(parameter.name.removesuffix("_or_prog"))) is None:
            if "prog" not in parameter.name:
                return None
            value = known["prog"]
        values.append(value)
    out = io.StringIO()
    try:
        with redirect_stdout(out):
            made = _text(function(*values))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return out.getvalue() + made


@dataclass(frozen=True)
class Share:
    """How many helpers do without debug info what they do with it."""

    called: int
    equal: int
    others: Mapping[str, str]
    """What each of the others says."""


def compare(pair: Pair) -> Share:
    """Call all helpers twice; those that fail with debug info, too, do not count."""
    of_dwarf, of_btf = arguments(pair.dwarf), arguments(pair.btf)
    called, others = 0, {}
    for name, function in helpers():
        expected = call(function, of_dwarf)
        if expected is None or _ERROR.match(expected):
            continue
        called += 1
        found = call(function, of_btf)
        if found != expected:
            others[name] = str(found).partition(":")[2].partition(":")[0].strip()
    return Share(called, called - len(others), others)


def _text(value: Any) -> str:
    match value:
        case Object():
            place = value.address_
            if place is None:
                place = value.value_() if value.type_.kind.name != "STRUCT" else ""
            # Two names of one type.
            name = value.type_.type_name().replace("pg_data_t", "struct pglist_data")
            return f"({name}){place}"
        case Type():
            return value.type_name()
        case StackTrace():
            return " ".join(f"{f.pc:x}" for f in value if not f.is_inline)
        case str() | bytes() | int() | None | float():
            return repr(value)
        case Mapping():
            return str([(_text(k), _text(v)) for k, v in value.items()])
        case Iterable():
            return str([_text(each) for each in islice(value, _MOST)])
    return type(value).__name__
