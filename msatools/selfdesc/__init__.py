# SPDX-License-Identifier: LGPL-2.1-or-later

"""Types and symbols from the kernel's own memory, for use without debug info."""

from msatools.selfdesc.btf import BtfError
from msatools.selfdesc.load import (
    NotSelfDescribedError,
    count_lost_symbols,
    create_modules,
    is_served_by_btf,
    load_btf,
    main_module,
    modules_with_btf,
    refusals,
)

__all__ = (
    "BtfError",
    "NotSelfDescribedError",
    "count_lost_symbols",
    "create_modules",
    "is_served_by_btf",
    "load_btf",
    "main_module",
    "modules_with_btf",
    "refusals",
)
