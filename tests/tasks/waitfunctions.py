# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Lists functions of a kernel that sleep uninterruptibly, and that no rule knows.

``python -m tests.tasks.waitfunctions field-7.x memory-5.10``: of each dump of the lab
(x86-64) those functions of the kernel proper that call the scheduler and set a state of
uninterruptible sleep, and that :mod:`msatools.tasks.waits` does not have.
:data:`EXPLAINED` says why some need not be there. A state that a caller hands on is
not seen.
"""

import re
import sys
from collections.abc import Iterator

import numpy as np
from drgn import Program

from msatools.tasks.waits import TaskClass, classify
from tests.support.dumps import open_dump

CALLED = (
    *("schedule", "io_schedule", "schedule_timeout", "io_schedule_timeout"),
    *("schedule_timeout_uninterruptible", "schedule_timeout_killable"),
    *("schedule_preempt_disabled", "schedule_hrtimeout_range", "schedule_hrtimeout"),
)
"""Functions of the scheduler that a sleeping function calls."""

STATES = (0x2, 0x102)
"""``TASK_UNINTERRUPTIBLE`` and ``TASK_KILLABLE``."""

EXPLAINED = {
    r"schedule_timeout_(uninterruptible|killable)": "the scheduler's own",
    r"kswapd|kcompactd|khugepaged|ksm_scan_thread|kauditd_thread|psi_rtpoll_worker|"
    r"xenbus_thread|hwrng_fillfn|rcu_nocb_\w+_kthread|nocb_gp_wait|"
    r"(lzo_)?(de)?compress_threadfn|crc32_threadfn|"
    r"rcu_tasks_kthread": "a kernel thread that is idle",
    r"(save|load)_(compressed_)?image(_lzo)?": "the machine is hibernated",
    r"suspend_devices_and_enter": "the machine is suspended",
    r"_*ps2_\w+|acpi_ec_stop|ec_guard|__tpm_tis_\w+|cppc_set_perf|pci_doe_wait|"
    r"pci_dpc_recovered|pci_wait_cfg|pcie_wait_cmd|pciehp_sysfs_\w+|"
    r"pci_hp_spurious_link_change": "a device, which answers, or a time limit ends it",
    r"xen_pv_cpu_die|xs_(send|suspend|talkv)": "the host of a guest under Xen",
}
"""Maps regular expressions of functions to the reason why no rule needs them."""


def unknown(prog: Program) -> list[str]:
    """Return the functions that no rule knows, and that nothing explains."""
    found = sorted(
        name
        for name in sleepers(prog)
        if classify(("schedule", name)).task_class is TaskClass.OTH
    )
    return [name for name in found if not explained(name)]


def explained(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in EXPLAINED)


def sleepers(prog: Program) -> Iterator[str]:
    """Yield the functions that sleep uninterruptibly, by their machine code."""
    start, end = (prog.symbol(name).address for name in ("_stext", "_etext"))
    code = prog.read(start, end - start)
    calls = call_sites(code, start, {prog.symbol(name).address for name in CALLED})
    symbols = {}
    for place in calls:
        symbol = prog.symbol(place)
        symbols[symbol.name] = symbol
    for name, symbol in symbols.items():
        first = symbol.address - start
        if sets_state(code[first : first + symbol.size]):
            yield name.partition(".")[0]


def call_sites(code: bytes, start: int, targets: set[int]) -> list[int]:
    """Return the addresses of calls and jumps to some functions."""
    data = np.frombuffer(code, np.uint8)
    places = np.flatnonzero((data[:-4] == 0xE8) | (data[:-4] == 0xE9))
    parts = [data[places + 1 + n].astype(np.uint32) << (8 * n) for n in range(4)]
    distance = (parts[0] | parts[1] | parts[2] | parts[3]).astype(np.int32)
    reached = np.uint64(start + 5) + places.astype(np.uint64)
    reached += distance.astype(np.int64).astype(np.uint64)
    # Some kernels call behind the first bytes of a function.
    near = np.array([t + n for t in targets for n in (0, 4)], np.uint64)
    return [start + place for place in places[np.isin(reached, near)].tolist()]


def sets_state(code: bytes) -> bool:
    """Return whether a function moves such a state to memory or to a register."""
    for state in STATES:
        word = re.escape(state.to_bytes(4, "little"))
        # mov $imm, %reg; and mov $imm to a member far into a structure.
        if re.search(rb"[\xb8-\xbf]" + word, code, re.DOTALL):
            return True
        if re.search(rb"\xc7[\x40-\x47\x80-\x87].{1,4}?" + word, code, re.DOTALL):
            return True
    return False


def main() -> int:
    for dump in sys.argv[1:]:
        found = unknown(open_dump(dump, "btf"))
        print(f"{dump}: {len(found)}", *found, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
