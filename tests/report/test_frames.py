# SPDX-License-Identifier: LGPL-2.1-or-later

"""Frames, and fingerprints that do not depend on a build."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msatools.report.log import (
    CALLERS,
    DIGITS,
    Cause,
    Frame,
    faulting,
    fingerprint,
    parse_frame,
    plain_name,
)


def frames(*names: str) -> list[Frame]:
    return [Frame(name, f"{name}+0x1/0x2") for name in names]


def of(cause: Cause, *names: str) -> str:
    return fingerprint(cause, faulting(frames(*names), cause), None)


@pytest.mark.parametrize(
    ("text", "function", "module"),
    [
        ("vfs_write+0xf8/0x450", "vfs_write", None),
        ("f.constprop.0+0x1/0x2 [ext4]", "f.constprop.0", "ext4"),
        ("f+0x1/0x2 [nf_tables 0123abcd]", "f", "nf_tables"),
        ("$x+0x0/0x4", "$x", None),
    ],
)
def test_a_frame(text: str, function: str, module: str | None) -> None:
    found = parse_frame(text)
    assert found is not None
    assert (found.function, found.module, found.text) == (function, module, text)


@pytest.mark.parametrize("text", ["0xffffffff81000000", "<TASK>", "", "a b+0x1/0x2"])
def test_no_frame(text: str) -> None:
    assert parse_frame(text) is None


@pytest.mark.parametrize(
    "name",
    [
        *("f", "f.isra.0", "f.constprop.0", "f.part.12", "f.cold", "f.isra.0.cold"),
        *("f.constprop.0.isra.0", "f.llvm.123456", "f_noprof"),
    ],
)
def test_suffixes_of_a_build(name: str) -> None:
    assert plain_name(name) == "f"


def test_two_builds_have_one_fingerprint() -> None:
    one = of("bug", "f.isra.0", "g", "vfs_write", "ksys_write", "do_syscall_64")
    other = of("bug", "f", "g.constprop.0", "vfs_write", "ksys_write", "x64_sys_call")
    assert one == other
    assert len(one) == DIGITS


def test_machinery_does_not_count() -> None:
    bare = of("page-fault", "f", "g")
    assert bare == of(
        "page-fault", "__die", "page_fault_oops", "exc_page_fault", "f", "g"
    )
    assert bare == of("page-fault", "panic", "oops_end", "f", "g", "entry_SYSCALL_64")


def test_a_thunk_does_not_count() -> None:
    """A bad pointer faults in the thunk that jumps by it."""
    jumps = "__x86_indirect_thunk_rax"
    assert of("protection-fault", jumps, "f", "g") == of("protection-fault", "f", "g")
    (first, *_) = faulting(frames("its_return_thunk", "f", "g"), "soft-lockup")
    assert first.function == "f"


def test_other_faults_have_others() -> None:
    assert (
        len({of("bug", "f", "g"), of("bug", "g", "f"), of("page-fault", "f", "g")}) == 3
    )
    assert of("bug", "f", "g") != of("bug", "f", "h")


def test_far_callers_do_not_count() -> None:
    near = [f"caller{number}" for number in range(CALLERS)]
    assert of("bug", "f", *near, "one") == of("bug", "f", *near, "two")


def test_recursion_counts_once() -> None:
    assert of("stack-overflow", *["f"] * 40, "g") == of("stack-overflow", "f", "g")


def test_a_stall_is_that_of_who_was_interrupted() -> None:
    watchdog = ("panic", "watchdog_timer_fn", "hrtimer_interrupt")
    entry = "asm_sysvec_apic_timer_interrupt"
    spins = ("native_queued_spin_lock_slowpath", "_raw_spin_lock", "driver_lock", "g")
    found = faulting(frames(*watchdog, entry, *spins), "soft-lockup")
    assert [frame.function for frame in found] == ["driver_lock", "g"]


def test_a_stack_of_waiting_alone_is_kept() -> None:
    found = faulting(frames("schedule", "mutex_lock"), "hung-task")
    assert [frame.function for frame in found] == ["mutex_lock"]


def test_want_of_memory_counts_what_had_none() -> None:
    asked: Sequence[Frame] = frames("filemap_fault")
    other: Sequence[Frame] = frames("do_anonymous_page")
    same = {fingerprint("out-of-memory", each, "none") for each in (asked, other)}
    assert len(same) == 1
    assert same != {fingerprint("out-of-memory", asked, "cgroup")}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.text(max_size=20), max_size=40), st.sampled_from(["bug", "rcu-stall"])
)
def test_any_names(names: list[str], cause: Cause) -> None:
    assert len(of(cause, *names)) == DIGITS
