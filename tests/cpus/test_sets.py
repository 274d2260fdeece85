# SPDX-License-Identifier: LGPL-2.1-or-later

"""Masks, cpusets and processor sets agree with the guest's record."""

import re

import pytest
from drgn import FaultError, Object, Program, container_of
from msgspec.structs import replace

from fixtures import lab
from msatools.cpus.masks import boot_words
from msatools.cpus.sets import Cpuset, set_of_cpus, with_reason
from msatools.kernel.percpu import mask_at, place_of
from tests.cpus.damaged import lose, put
from tests.cpus.guests import CPU, GROUPS, KERNELS, numbers
from tests.cpus.madecpus import cpuset
from tests.cpus.setdumps import Seen, look_at, seen, set_of


@pytest.fixture(params=KERNELS)
def dump(request: pytest.FixtureRequest) -> Seen:
    """The cpus scenario, on each kernel."""
    return seen(f"cpus-{request.param}")


def of_path(path: str) -> Cpuset:
    (found,) = [one for one in seen("cpus-6.12").cpusets.all if one.path == path]
    return found


def read_sets(program: Program) -> Seen:
    return look_at(program, lab.build("cpus-6.12"))


# --- masks


def test_cpus_isolated_by_the_command_line(dump: Seen) -> None:
    options = dump.run.workload["isolation"]
    assert dump.masks.isolcpus == dump.numbers(f"{CPU}/isolated") != ()
    assert dump.masks.nohz_full == dump.numbers(f"{CPU}/nohz_full") != ()
    assert dump.masks.managed_irq == dump.masks.isolcpus
    offloaded = {*numbers(options["rcu_nocbs"]), *numbers(options["nohz_full"])}
    assert dump.masks.rcu_nocb == tuple(sorted(offloaded))
    assert dump.masks.words == {
        "isolcpus": f"isolcpus={options['isolcpus']}",
        "managed_irq": f"isolcpus={options['isolcpus']}",
        "nohz_full": f"nohz_full={options['nohz_full']}",
        "rcu_nocb": (
            f"nohz_full={options['nohz_full']} rcu_nocbs={options['rcu_nocbs']}"
        ),
    }


def test_cpus_of_partitions_are_isolated(dump: Seen) -> None:
    isolated = f"{GROUPS}/cpuset.cpus.isolated"
    if dump.has(isolated):
        assert dump.masks.isolated == dump.numbers(isolated)
    quiet = dump.numbers(f"{GROUPS}/quiet/cpuset.cpus")
    both = {*quiet, *dump.numbers(f"{CPU}/isolated")}
    assert dump.masks.isolated == tuple(sorted(both))


def test_root_domains_are_those_in_the_kernel_log(dump: Seen) -> None:
    """The current domains are the last ones logged for their CPUs."""
    spans = [
        numbers(match[1])
        for line in dump.run.workload["log"]
        if (match := re.match(r"root domain span: ([\d,-]+)", line))
    ]
    found: dict[int, list[int]] = {}
    for cpu in dump.masks.online:
        found.setdefault(dump.domains.by_cpu[cpu], []).append(cpu)
    assert dump.domains.unbalanced is not None
    assert tuple(found.pop(dump.domains.unbalanced)) == dump.masks.isolated
    assert len(found) == 2
    assert {tuple(cpus) for cpus in found.values()} <= set(spans)
    for cpu in dump.masks.online:
        has_siblings = (
            dump.domains.of(dump.masks.online[:1]) == (dump.domains.by_cpu[cpu])
        )
        files = f"sys/kernel/debug/sched/domains/cpu{cpu}/domain0/name"
        assert dump.has(files) == has_siblings, cpu


# --- cpusets


def partition_text(one: Cpuset) -> str:
    """Return the contents of ``cpuset.cpus.partition``."""
    text = one.partition if one.valid else f"{one.partition} invalid"
    return text if one.reason is None else f"{text} ({one.reason})"


def test_all_cpusets_equal_their_files(dump: Seen) -> None:
    pattern = f"{GROUPS}(/.*|)/cpuset.cpus.effective"
    matches = (re.fullmatch(pattern, name) for name in dump.run.truth_names())
    paths = {match[1] for match in matches if match}
    assert {one.path for one in dump.cpusets.all} == {path or "/" for path in paths}
    assert dump.cpusets.unified
    files = {
        "cpuset.cpus": lambda one: one.asked,
        "cpuset.cpus.effective": lambda one: one.effective,
        "cpuset.cpus.exclusive": lambda one: one.exclusive,
        "cpuset.cpus.exclusive.effective": lambda one: one.effective_exclusive,
        "cpuset.mems": lambda one: one.asked_nodes,
        "cpuset.mems.effective": lambda one: one.nodes,
    }
    states = set()
    for one in dump.cpusets.all:
        where = f"{GROUPS}{(one.path or '').rstrip('/')}"
        for name, field in files.items():
            if dump.has(f"{where}/{name}"):
                recorded = dump.numbers(f"{where}/{name}")
                assert field(one) == recorded, (one.path, name)
            elif one.parent:
                assert field(one) is None, (one.path, name)
        if one.parent:
            state = dump.truth(f"{where}/cpuset.cpus.partition")
            assert partition_text(one) == state, one.path
            states.add(state.partition(" (")[0])
    assert states == {"member", "root", "isolated", "root invalid"}
    assert any(one.reason for one in dump.cpusets.all)


def test_parents_are_first(dump: Seen) -> None:
    paths = {one.address: one.path or "" for one in dump.cpusets.all}
    first, *others = dump.cpusets.all
    assert (first, first.path) == (dump.cpusets.root, "/")
    known = {first.address}
    for one in others:
        assert one.parent in known
        assert (one.path or "").rpartition("/")[0] == paths[one.parent].rstrip("/")
        known.add(one.address)


# --- sets


def test_sets_and_their_sources(dump: Seen) -> None:
    made = dump.run.workload["sets"]
    words = dump.run.workload["isolation"]
    partitions = [one["path"] for one in made if one["partition"] != "member"]
    limits = [
        one["path"]
        for one in made
        if one["partition"] == "member" and (one["cpus"] or one["mems"])
    ]
    names = ["default", *partitions, "isolcpus", "nohz_full", *limits]
    assert [one.name for one in dump.sets] == names
    for fact in made:
        if fact["path"] not in names:
            continue
        one = dump.one(fact["path"])
        where = f"{GROUPS}{fact['path']}"
        assert one.asked == (numbers(fact["cpus"]) or None)
        assert one.cpus == dump.numbers(f"{where}/cpuset.cpus.effective")
        assert one.nodes == dump.numbers(f"{where}/cpuset.mems.effective")
        state = dump.truth(f"{where}/cpuset.cpus.partition")
        kind = "limit" if fact["partition"] == "member" else fact["partition"]
        assert one.kind == (kind if fact["valid"] else "invalid")
        assert (one.reason or "") == state.partition("(")[2].rstrip(")")
        assert one.source.startswith("cpuset")
    assert dump.one("/gone").source == "cpuset partition (root)"
    assert dump.one("isolcpus").source == f"isolcpus={words['isolcpus']}"
    assert dump.one("nohz_full").source == f"nohz_full={words['nohz_full']}"
    for name in ("isolcpus", "nohz_full"):
        file = "isolated" if name == "isolcpus" else name
        assert dump.one(name).cpus == dump.numbers(f"{CPU}/{file}")
        assert dump.one(name).kind == name


def test_default_set_has_the_other_cpus(dump: Seen) -> None:
    default = dump.one("default")
    assert (default.kind, default.source, default.asked) == ("root", "/", None)
    names = ("/db", "/quiet", "isolcpus", "nohz_full")
    taken = {cpu for name in names for cpu in dump.one(name).cpus}
    assert len(taken) == 3
    assert set(default.cpus) == set(dump.masks.online) - taken
    assert default.nodes == dump.numbers(f"{GROUPS}/cpuset.mems.effective")


def test_balanced_sets(dump: Seen) -> None:
    found = {one.name: one.balanced for one in dump.sets}
    assert found == {
        "default": True,
        "/db": True,
        "/quiet": False,
        # Sets with isolated and other CPUs.
        "/gone": None,
        "/mems": None,
        "/limit": True,
        "/limit/one": True,
        "/limit/root": True,
        "isolcpus": False,
        "nohz_full": False,
    }
    default, db = dump.one("default").root_domain, dump.one("/db").root_domain
    assert default
    assert db
    assert default != db
    assert dump.one("/limit").root_domain == default
    assert dump.one("/quiet").root_domain is None


def test_exclusive_cpus(dump: Seen) -> None:
    file = f"{GROUPS}/db/cpuset.cpus.exclusive.effective"
    recorded = dump.numbers(file) if dump.has(file) else None
    assert dump.one("/db").exclusive == recorded
    assert dump.one("/limit").exclusive is None


def test_the_set_of_each_cpu(dump: Seen) -> None:
    names = set_of_cpus(dump.sets, dump.masks.possible)
    roles = dump.roles
    assert tuple(names) == dump.masks.possible
    assert names[roles["partition"]] == "/db"
    assert names[roles["quiet"]] == "/quiet"
    assert names[roles["isolated"]] == "isolcpus"
    # Its partition is invalid, so the CPU is in the default set.
    assert names[roles["gone"]] == "default"
    assert sum(name != "default" for name in names.values()) == 3


# --- cpusets made by hand, and losses


def test_cpus_of_several_sets_are_named_by_the_deepest_partition() -> None:
    sets = (
        set_of("default", "root", (0,)),
        # The first set has passed on two of its CPUs, of which one is offline.
        set_of("/a", "root", (1,), asked=(1, 2, 3)),
        set_of("/a/b", "isolated", (2,), asked=(2, 3)),
        set_of("/c", "invalid", (0, 1), asked=(0, 7)),
        set_of("isolcpus", "isolcpus", (2, 4), asked=(2, 4, 8)),
        set_of("nohz_full", "nohz_full", (4, 5), asked=(4, 5)),
        set_of("/d", "limit", (0,), asked=(0, 9)),
    )
    assert set_of_cpus(sets, range(10)) == {
        0: "default",
        1: "/a",
        2: "/a/b",
        3: "/a/b",
        4: "isolcpus",
        5: "nohz_full",
        6: "default",
        7: "default",
        8: "isolcpus",
        9: "default",
    }


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("quiet root=/dev/sda1", {}),
        ("isolcpus=1-3", {"isolcpus": "isolcpus=1-3"}),
        ("isolcpus=nohz,1", {"nohz_full": "isolcpus=nohz,1"}),
        ("isolcpus=later,1", {"isolcpus": "isolcpus=later,1"}),
        ("isolcpus=managed_irq,1", {"managed_irq": "isolcpus=managed_irq,1"}),
        ('rcu_nocbs "nohz_full=2"', None),
        ("init=/x -- isolcpus=1", {}),
        ("isolcpus=", {}),
        ('dyndbg="file isolcpus=1 +p"', {}),
    ],
)
def test_words_of_the_command_line(line: str, found: dict[str, str] | None) -> None:
    if found is None:
        found = {"nohz_full": "nohz_full=2", "rcu_nocb": "rcu_nocbs nohz_full=2"}
    assert boot_words(line) == found


def test_unreadable_cpuset_is_counted(program: Program) -> None:
    whole = seen("cpus-6.12")
    lose(program, of_path("/quiet").address, 8)
    found = read_sets(program)
    assert found.losses.coverage["queues_broken"]
    paths = [one.path for one in found.cpusets.all]
    assert "/db" in paths
    assert "/quiet" not in paths
    # Its CPU is still known to be isolated.
    assert found.masks.isolated == whole.masks.isolated


def test_unreadable_mask_is_counted(program: Program) -> None:
    pointer = program["isolated_cpus"]
    lose(program, pointer.value_(), 8)
    lose(program, program["rcu_nocb_mask"].value_(), 8)
    found = read_sets(program)
    assert found.losses.coverage["cpumasks_unreadable"] == 2
    assert found.masks.rcu_nocb is None
    # The online CPUs' isolation is known from root domains.
    assert found.masks.isolated == seen("cpus-6.12").masks.isolated


def test_loop_of_cpusets_ends(program: Program) -> None:
    """A child is its own first child."""
    first = program["top_cpuset"].css.children.next
    node = first.value_()
    below = container_of(first, "struct cgroup_subsys_state", "sibling").children.next
    put(program, below.address_, node.to_bytes(8, "little"))
    found = read_sets(program)
    assert found.losses.coverage["queues_broken"]
    assert len(found.cpusets.all) < len(seen("cpus-6.12").cpusets.all)


def test_partition_of_unknown_kind_is_noted(program: Program) -> None:
    one = of_path("/db")
    state = program["top_cpuset"].type_.member("partition_root_state")
    put(program, one.address + state.bit_offset // 8, (9).to_bytes(4, "little"))
    found = read_sets(program)
    assert found.losses.coverage["partitions_unknown"]
    assert found.one("/db").kind == "limit"


def test_unknown_reason_is_a_number(program: Program) -> None:
    one = of_path("/limit/root")
    error = program["top_cpuset"].type_.member("prs_err")
    put(program, one.address + error.bit_offset // 8, (99).to_bytes(4, "little"))
    found = read_sets(program)
    assert found.one("/limit/root").reason == "error 99"
    assert found.losses.lost["partitions_unknown"]


def test_cpusets_of_cgroup_v1(program: Program) -> None:
    """In cgroup v1 each asks for CPUs: one that is like its parent is no set."""
    put(program, program["cpuset_cgrp_subsys"].root.address_, bytes(8))
    found = read_sets(program)
    assert not found.cpusets.unified
    limits = {one.name: one for one in found.sets if one.kind == "limit"}
    assert limits["/limit/one"].cpus == seen("cpus-6.12").one("/limit/one").cpus
    # It has no CPUs of its own.
    assert "/mems" not in limits


def test_kernel_without_nr_cpu_ids(program: Program) -> None:
    lose(program, program["nr_cpu_ids"].address_, 4)
    found = read_sets(program)
    assert found.masks.online == ()
    assert all(one.tasks is None for one in found.sets)
    assert found.losses.lost
    with pytest.raises(FaultError):
        found.reader.read(program["nr_cpu_ids"].address_, 4)


def test_masks_in_variables_and_behind_pointers(dump: Seen) -> None:
    """``cpumask_var_t`` is a pointer or an array, by configuration."""
    pointer = dump.prog["tick_nohz_full_mask"]
    assert place_of(pointer) == pointer.value_()
    mask = dump.prog.array_type(dump.prog.type("struct cpumask"), 1)
    here = Object(dump.prog, mask, address=pointer.value_())
    assert place_of(here) == pointer.value_()
    assert mask_at(dump.reader, place_of(here)) == dump.masks.nohz_full


def test_partition_without_online_cpus() -> None:
    """The kernel has no reason for it; all other reasons are the kernel's."""
    gone = cpuset("/gone", (0, 1), kind="invalid", asked=(3, 4))
    assert with_reason(gone, (0, 1, 2)).reason == (
        "no CPU of it is online (cpuset.cpus is 3-4)"
    )
    with_kernels_reason = replace(gone, reason="Not exclusive")
    for other in (
        with_kernels_reason,
        replace(gone, kind="root"),
        replace(gone, asked=None),
    ):
        assert with_reason(other, (0, 1, 2)) == other
    assert with_reason(gone, (0, 3)).reason is None
