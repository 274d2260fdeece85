# SPDX-License-Identifier: LGPL-2.1-or-later
"""The guests with eight CPUs are what their workload says that they are."""

import pytest

from fixtures import lab
from fixtures.lab import cpus
from fixtures.lab.guest import cpus as guest
from fixtures.lab.guest.cputruth import COUNTERS
from fixtures.lab.kernels import KERNELS
from msatools.cli.values import cpu_list

STILL = "eth3"
"""Nothing is sent to it, so its interrupt does not come and is not moved yet."""


@pytest.fixture(scope="module", params=["6.1", "6.12"])
def run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(f"cpus-{request.param}")


def text(run: lab.Run, name: str) -> str:
    return run.truth(name).decode(errors="replace").strip()


def test_machine_has_threads_and_networks() -> None:
    words = " ".join(cpus.machine(KERNELS["6.1"]).arguments())
    assert "tcg,thread=multi" in words
    assert "-smp 8,sockets=3,cores=2,threads=2,maxcpus=12" in words
    assert words.count("virtio-net-pci") == words.count("hubport") == 4


def test_every_cpu_has_a_role_of_its_own() -> None:
    assert sorted(guest.CPUS.values()) == list(range(cpus.CPUS))


def test_interrupts_may_land_where_they_are_to(run: lab.Run) -> None:
    wanted = 0
    driver = run.workload["networks"][STILL]["driver_name"]
    for name, irq in run.workload["irqs"].items():
        place = f"proc/irq/{irq['irq']}"
        affinity = set(cpu_list(text(run, f"{place}/smp_affinity_list")))
        effective = set(cpu_list(text(run, f"{place}/effective_affinity_list")))
        if name == guest.GOES:
            # Its one CPU went: the kernel lets it land on any.
            assert affinity >= set(range(cpus.CPUS))
            assert effective
            assert guest.GONE not in effective
        elif irq["wanted"]:
            assert affinity == set(cpu_list(irq["wanted"])), name
            assert len(effective) == 1, name
            if name != f"{driver}-input.0":
                assert effective <= affinity, name
            wanted += 1
    assert wanted == len(guest.AFFINITIES)
    managed = [name for name, irq in run.workload["irqs"].items() if irq["managed"]]
    assert len(managed) >= 4 + cpus.CPUS


def test_counters_are_read_one_after_the_other(run: lab.Run) -> None:
    names = run.truth_names()
    expected = []
    for number, path in enumerate(COUNTERS):
        expected += [f"clock/{number}", path.lstrip("/")]
    assert names[-len(expected) - 1 :] == [*expected, f"clock/{len(COUNTERS)}"]
    words = [text(run, name).split() for name in names if name.startswith("clock/")]
    times = [int(each[each.index("at") + 1]) for each in words]
    assert times == sorted(times)
    assert len(times) == len(COUNTERS) + 1
