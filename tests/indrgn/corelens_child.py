# SPDX-License-Identifier: LGPL-2.1-or-later

"""Run in the peer's environment: every module of corelens on one dump, as JSON.

``corelens_child.py DUMP [VMLINUX]``: with the debug info of the kernel proper, or with
the kernel's own types.
"""

import contextlib
import io
import json
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from drgn_tools.corelens import (  # type: ignore[import-not-found]
    all_corelens_modules,
)
from drgn_tools.module import (  # type: ignore[import-not-found]
    get_module_load_summary,
)

from msatools.program import TargetSpec, open_target
from msatools.selfdesc import create_modules

SECONDS = 120
"""The longest that one module may take."""

ARGUMENTS = {
    "ls": ["/"],
    "pages-pinning-memcg": ["--max", "100"],
    "pstack-dump": ["/dev/null"],
    "slabdump": ["--limit", "2", "task_struct"],
}
"""Arguments of modules that want some, or take an hour without."""


def main(dump: str, *vmlinux: str) -> None:
    """Print what each module prints, and the error that it ends by, if any."""
    types = {"vmlinux": vmlinux[0]} if vmlinux else {"types": "btf"}
    prog = open_target(TargetSpec(path=dump, **types)).prog
    create_modules(prog)
    loaded = {module.name for module in get_module_load_summary(prog).all_mods()}
    signal.signal(signal.SIGALRM, _expire)
    made = {}
    for name, module in sorted(all_corelens_modules().items()):
        lacking = [
            each for each in module.skip_unless_have_kmods or () if each not in loaded
        ]
        runs = [] if lacking else [*_runs(name, module)]
        made[name] = {
            "modules": lacking,
            "runs": [_run(module, prog, args) for args in runs],
        }
    json.dump(made, sys.stdout)


def _runs(name: str, module: Any) -> Iterator[Any]:
    """Yield the arguments of each run that a report of corelens makes."""
    if name in ARGUMENTS:
        yield module._parse_args(ARGUMENTS[name])
    else:
        yield from module._default_args(verbose=True)


def _run(module: Any, prog: Any, args: Any) -> dict[str, str]:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    error = ""
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out):
            module.run(prog, args)
    except Exception as caught:
        place = traceback.extract_tb(caught.__traceback__)[-1]
        text = str(caught).partition("\n")[0]
        error = f"{type(caught).__name__}: {text}"
        print(f"{module.name}: {error} ({place.filename})", file=sys.stderr)
    finally:
        signal.alarm(0)
    out.flush()
    written = out.buffer
    assert isinstance(written, io.BytesIO)
    return {"out": written.getvalue().decode(), "error": error}


def _expire(*_: object) -> None:
    raise TimeoutError(f"it takes more than {SECONDS} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
