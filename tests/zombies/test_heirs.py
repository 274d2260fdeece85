# SPDX-License-Identifier: LGPL-2.1-or-later

"""Who would inherit the dead, as the guest works it out from its /proc."""

from dataclasses import replace

import pytest

from msatools.kernel.report import Findings
from msatools.zombies.heirs import find_heirs
from msatools.zombies.model import Heir
from tests.support.dumps import pairs
from tests.zombies.dumps import ZOMBIES, Dump, read_dump


@pytest.fixture(scope="module", params=pairs(ZOMBIES))
def dump(request: pytest.FixtureRequest) -> Dump:
    return read_dump(*request.param)


@pytest.fixture(scope="module")
def heirs(dump: Dump) -> dict[int, Heir]:
    findings = Findings()
    found = find_heirs(dump.reader, dump.tasks, dump.dead, findings)
    assert not findings.notes
    assert len({heir.ppid for heir in found}) == len(found)
    return {heir.ppid: heir for heir in found}


def pid_of(dump: Dump, name: str) -> int:
    return int(dump.workload["tasks"][name]["pid"])


def test_heirs_equal_the_guests(dump: Dump, heirs: dict[int, Heir]) -> None:
    parents = dump.workload["parents"]
    assert len(parents) > 40
    for parent in parents:
        assert heirs[parent["pid"]].heir == parent["heir"], parent["comm"]
    # Process 1 has a dead child that the guest leaves out, as a thread of it lives.
    assert heirs.keys() - {parent["pid"] for parent in parents} <= {1}


def test_namespaces_of_all_parents_are_read_at_once(dump: Dump) -> None:
    before = dump.reader.reads
    found = find_heirs(dump.reader, dump.tasks, dump.dead, Findings())
    assert len(found) > 40
    assert dump.reader.reads - before < len(found)


def test_reasons(dump: Dump, heirs: dict[int, Heir]) -> None:
    comms = {parent["comm"]: parent for parent in dump.workload["parents"]}
    first = comms["never-sleeps"]
    assert heirs[first["pid"]] == Heir(
        ppid=first["pid"],
        heir=1,
        heir_comm="python3",
        why=f"init of PID namespace {first['namespace']}",
        reaps=True,
    )
    below = heirs[comms["below-subreaper"]["pid"]]
    assert (below.heir, below.why) == (pid_of(dump, "above"), "subreaper")
    inner = comms["inner-service"]
    found = heirs[inner["pid"]]
    assert (found.heir, found.heir_comm) == (pid_of(dump, "init-inner"), "init-inner")
    assert found.why == f"init of PID namespace {inner['namespace']}"
    ends = heirs[comms["init-1"]["pid"]]
    assert ends.why == f"PID namespace {comms['init-1']['namespace']} ends with it"
    assert (ends.heir, ends.heir_comm, ends.reaps) == (None, None, None)


def test_who_reaps(dump: Dump, heirs: dict[int, Heir]) -> None:
    """One that has dead children of its own does not; one that has waited does."""
    told = {heir.heir: heir.reaps for heir in heirs.values()}
    assert told.pop(None) is None
    assert told == {
        1: True,
        pid_of(dump, "init-inner"): False,
        # It has none yet, and has never waited.
        pid_of(dump, "above"): None,
    }


def test_what_is_lost_is_noted(dump: Dump) -> None:
    """Of processes whose PIDs lead nowhere."""
    records = dump.tasks.records.copy()
    row = int((records["pid"] == pid_of(dump, "never-sleeps")).nonzero()[0][0])
    records["thread_pid"][row] = 0x8_0000
    findings = Findings()
    broken = replace(dump.tasks, records=records)
    found = find_heirs(dump.reader, broken, dump.dead, findings)
    everyone = find_heirs(dump.reader, dump.tasks, dump.dead, Findings())
    left_out = {heir.ppid for heir in everyone} - {heir.ppid for heir in found}
    assert left_out == {pid_of(dump, "never-sleeps")}
    assert findings.lost["heirs"] == 1


def test_loop_ends(dump: Dump) -> None:
    """Of damaged tasks that are their own parents' parents."""
    records = dump.tasks.records.copy()
    rows = {pid: row for row, pid in enumerate(records["pid"].tolist())}
    below, above = (rows[pid_of(dump, name)] for name in ("below-subreaper", "above"))
    records["real_parent"][above] = records["address"][below]
    records["flags"][records["signal"] == records["signal"][above]] |= 0x4
    findings = Findings()
    find_heirs(dump.reader, replace(dump.tasks, records=records), dump.dead, findings)
    assert findings.lost["heirs"] == 1
