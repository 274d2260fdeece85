# SPDX-License-Identifier: LGPL-2.1-or-later

"""The report as a whole: parts that fail, the crash without its log, what it costs."""

import re
import shlex
from functools import cache
from struct import pack

import numpy as np
import pytest
from drgn import FaultError, offsetof, sizeof
from drgn.helpers.linux.pid import find_task
from msatools.commands.report import COMMAND

from fixtures import lab
from msatools.cli.sandbox import binding
from msatools.errors import DamagedDataError, MissingError
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.program import Opened, TargetSpec, open_target
from msatools.program.description import crash_of
from msatools.registry import NAMES
from msatools.report import report as report_module
from msatools.report.log import read_log
from msatools.report.model import SECTIONS, TriageReport
from msatools.report.report import collect_report
from msatools.selfdesc import BtfError
from msatools.tasks.table import TaskReader
from tests.support import overlay
from tests.support.calls import CORE, call

CRASHED = "crashes-null-6.12"


def opened(dump: str) -> Opened:
    path = str(lab.build(dump).kept)
    return open_target(TargetSpec(path=path, types="btf"))


@cache
def report(dump: str) -> TriageReport:
    found = opened(dump)
    return collect_report(found.prog, target=found.target)


# --- the crash


def test_crash() -> None:
    found = report(CRASHED)
    crash = found.crash
    assert crash is not None
    assert crash.message == "BUG: kernel NULL pointer dereference, address: " + (
        "0000000000000040"
    )
    assert crash.frames[0].startswith("cm_read_state+0x")
    assert crash.frames[0].endswith(" [crashmodule]")
    assert "O" in (crash.taints or "")
    assert found.verdicts[0].code == "panic"
    assert found.next[0].command.endswith(" -v")


def test_crash_without_its_log() -> None:
    """The stack is that of the registers; it names the cause, too."""
    found = opened("crash-6.12")
    with_log = collect_report(found.prog, target=found.target).crash
    overlay.lose(found.prog, found.prog["prb"].address_, 8)
    lost = collect_report(found.prog, target=found.target)
    crash = lost.crash
    assert crash is not None
    assert with_log is not None
    assert (crash.cause, crash.function) == ("sysrq", "sysrq_handle_crash")
    assert crash.fingerprint == with_log.fingerprint
    assert (crash.cpu, crash.pid, crash.comm) == (
        with_log.cpu,
        with_log.pid,
        with_log.comm,
    )
    assert lost.coverage["log_unreadable"] == 1
    assert lost.log == ()


def test_command_lines_can_be_typed() -> None:
    """Each is of a command, with options that it knows."""
    from msatools.cli.arguments import make_parser
    from msatools.registry import load

    for dump in (CRASHED, "locks-6.12", "lockmodule-6.12"):
        found = report(dump)
        lines = [step.command for step in found.next]
        lines += [verdict.see for verdict in found.verdicts]
        assert 2 <= len(found.next) <= 5
        for line in lines:
            name, *words = shlex.split(line)
            command = load(name.removeprefix("msa-"))
            parser = make_parser(command, in_drgn=False)
            assert parser.parse_intermixed_args(words)


# --- parts that fail


@pytest.mark.parametrize("name", SECTIONS)
def test_a_part_that_fails_is_a_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FaultError("lost in this test", 0x1234)

    monkeypatch.setattr(report_module, f"collect_{name}", fail)
    ran = call(COMMAND, "--json", CORE)
    assert ran.status == 0
    sections = ran.json["sections"]
    assert "lost in this test" in sections[name]["error"]
    others = [section for key, section in sections.items() if key != name]
    assert all(each["summary"] for each in others)
    assert ran.json["coverage"]["parts_lost"] == 1
    strict = call(COMMAND, "--strict", CORE)
    assert strict.status == 3
    assert f"{name}: " in strict.out


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DamagedDataError("a loop", 8), "a loop: 0x8"),
        (BtfError("no type"), "no type"),
        (MissingError("no member"), "no member"),
        (MemoryError(), "there is not enough memory"),
    ],
)
def test_what_is_damaged_or_missing_ends_one_part(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(report_module, "collect_locks", fail)
    ran = call(COMMAND, "--json", CORE)
    assert ran.status == 0
    assert ran.json["sections"]["locks"]["error"] == said
    assert ran.err == ""


# --- what it costs


def test_tasks_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    walks = []
    walk = TaskReader._walk

    def counted(self: TaskReader, losses: LossLog) -> object:
        walks.append(self)
        return walk(self, losses)

    monkeypatch.setattr(TaskReader, "_walk", counted)
    found = opened(CRASHED)
    made = collect_report(found.prog, target=found.target)
    assert len(walks) == 1
    assert made.sections["prstat"].summary
    assert collect_report(found.prog, target=found.target).verdicts == made.verdicts
    assert len(walks) == 2


# --- the command


def test_fingerprint_alone() -> None:
    found = opened(CRASHED)  # the sandbox would not let the lab lock its files
    ran = call(COMMAND, "--fingerprint", CORE, opening=lambda _: found)
    assert (ran.status, ran.err) == (0, "")
    crash = report(CRASHED).crash
    assert crash is not None
    assert ran.out == f"{crash.fingerprint}\n"
    ran = call(COMMAND, "--fingerprint", CORE)
    assert (ran.status, ran.out) == (0, "the kernel has not crashed\n")


def test_page_is_in_order() -> None:
    found = opened(CRASHED)
    ran = call(COMMAND, CORE, opening=lambda _: found)
    titles = (
        "CRASHED: ",
        "No other problem found by",
        "memstat: ",
        "cpus: ",
        "NEXT",
        "LOG",
    )
    places = [ran.out.index(title) for title in titles]
    assert places == sorted(places)


def test_full_has_each_command() -> None:
    ran = call(COMMAND, "--full", CORE)
    heads = re.findall(r"^--- msa-(\w+)$", ran.out, re.MULTILINE)
    assert {*heads} == {*NAMES} - {"report"} & {*SECTIONS}


def test_names_are_escaped() -> None:
    def renamed(spec: TargetSpec) -> Opened:
        found = open_target(TargetSpec(path=CORE, types="btf"))
        name = find_task(found.prog, 210).comm.address_
        overlay.put(found.prog, name, b"a\x1b[31m\n[b]".ljust(16, b"\0"))
        return found

    ran = call(COMMAND, "--full", CORE, opening=renamed)
    assert (ran.status, ran.err) == (0, "")
    assert "a\\x1b[31m\\x0a[b]" in ran.out
    assert all(line.isprintable() for line in ran.out.splitlines())


@pytest.mark.skipif(binding() is None, reason="no seccomp")
def test_dumps_are_read_in_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def inside(name: str, path: str, work: object, *, is_paged: bool) -> int:
        used.append(name)
        return 0

    monkeypatch.setattr("msatools.cli.sandbox.in_sandbox", inside)
    assert call(COMMAND, CORE).status == 0
    assert used == ["msa-report"]
    call(COMMAND, "--fingerprint", "--qemu", "still.sock")
    assert used == ["msa-report"]


def test_without_seccomp_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msatools.cli.sandbox.binding", lambda: None)
    ran = call(COMMAND, "--json", CORE)
    assert (ran.status, ran.err) == (0, "")
    assert "no-sandbox" in [note["code"] for note in ran.json["notes"]]


# --- the log


def test_log_as_drgn_reads_it() -> None:
    from drgn.helpers.linux.printk import get_printk_records

    prog = opened(CRASHED).prog
    losses = LossLog()
    ours = read_log(Reader(prog), losses)
    theirs = get_printk_records(prog)
    assert len(ours) > 300
    assert [
        (each.time_ns, each.facility, each.level, each.text, each.tid, each.cpu)
        for each in ours
    ] == [
        (
            each.timestamp,
            each.facility,
            each.level,
            each.text.decode("utf-8", "backslashreplace"),
            each.caller_tid,
            each.caller_cpu,
        )
        for each in theirs
    ]
    assert not losses.lost


def test_log_whose_end_is_far() -> None:
    """It has as many messages as there is room for. drgn's helper reads on for ever."""
    opened_ = opened(CRASHED)
    prog = opened_.prog
    whole = read_log(Reader(prog), LossLog())
    ring = prog["prb"].desc_ring
    last = ring.head_id.counter.value_()
    count = 1 << ring.count_bits.value_()
    overlay.put(prog, ring.tail_id.counter.address_, pack("<Q", last + 1))
    assert read_log(Reader(prog), LossLog()) == whole
    assert crash_of(prog) == opened_.target.crash
    assert len(whole) < count


def test_log_of_one_text() -> None:
    """Each message is said to be all of the text: that takes more than the ring."""
    prog = opened(CRASHED).prog
    descs, texts = prog["prb"].desc_ring, prog["prb"].text_data_ring
    count, size = (1 << ring.value_() for ring in (descs.count_bits, texts.size_bits))
    whole = read_log(Reader(prog), LossLog())
    start = descs.descs.value_()
    # struct prb_desc: the state, and where the text begins and ends.
    rows = np.frombuffer(prog.read(start, 24 * count), np.uint64).reshape(-1, 3).copy()
    rows[:, 1:] = 0, size - 8
    overlay.put(prog, start, rows.tobytes())
    info = prog.type("struct printk_info")
    for row in range(count):
        at = descs.infos.value_() + row * sizeof(info) + offsetof(info, "text_len")
        overlay.put(prog, at, pack("<H", 0xFFFF))
    losses = LossLog()
    found = read_log(Reader(prog), losses)
    assert 0 < len(found) * 0xFFFF <= size
    assert losses.lost["log_unreadable"] == len(whole) - len(found)


def test_texts_in_another_order_than_their_messages() -> None:
    """A CPU that interrupts another takes a later message, and its text before."""
    prog = open_target(TargetSpec(path=CORE, types="btf")).prog
    whole = read_log(Reader(prog), LossLog())
    descs, texts = prog["prb"].desc_ring, prog["prb"].text_data_ring
    count, size = (1 << ring.value_() for ring in (descs.count_bits, texts.size_bits))
    last = descs.head_id.counter.value_()
    rows = [(last - back) % count for back in (2, 1)]
    places = [descs.descs[row].text_blk_lpos for row in rows]
    starts = [texts.data.value_() + place.begin.value_() % size for place in places]
    lengths = [descs.infos[row].text_len.address_ for row in rows]
    # Where each text is, the message that it says to be of, and its length.
    for pair, length in (([p.address_ for p in places], 16), (starts, 8), (lengths, 2)):
        data = [prog.read(at, length) for at in pair]
        for at, other in zip(pair, data[::-1], strict=True):
            overlay.put(prog, at, other)
    losses = LossLog()
    found = read_log(Reader(prog), losses)
    assert [each.text for each in found[-3:-1]] == [whole[-2].text, whole[-3].text]
    assert [*found[:-3], found[-1]] == [*whole[:-3], whole[-1]]
    assert not losses.lost["log_unreadable"]


def test_log_beyond_all_memory() -> None:
    opened_ = opened(CRASHED)
    descs = opened_.prog["prb"].desc_ring.descs.address_
    overlay.put(opened_.prog, descs, pack("<Q", (1 << 64) - 8))
    losses = LossLog()
    assert read_log(Reader(opened_.prog), losses) == []
    assert losses.lost["log_unreadable"]
    crash = crash_of(opened_.prog)
    assert crash is not None
    assert opened_.target.crash is not None
    assert (crash.message, crash.pid) == (None, opened_.target.crash.pid)


def test_log_with_a_lost_page() -> None:
    """The messages of that page are lost, and no others."""
    prog = opened(CRASHED).prog
    whole = read_log(Reader(prog), LossLog())
    text = prog["prb"].text_data_ring.data.value_()
    overlay.lose_page(prog, text + overlay.PAGE)
    losses = LossLog()
    left = read_log(Reader(prog), losses)
    assert losses.lost["log_unreadable"] == len(whole) - len(left) > 0
    assert {*left} < {*whole}


@pytest.mark.parametrize("member", ["desc_ring.count_bits", "text_data_ring.size_bits"])
def test_log_of_an_absurd_size(member: str) -> None:
    prog = opened(CRASHED).prog
    place = prog["prb"][0]
    for part in member.split("."):
        place = place.member_(part)
    overlay.put(prog, place.address_, b"\xff" * sizeof(place.type_))
    losses = LossLog()
    assert read_log(Reader(prog), losses) == []
    assert losses.lost["log_unreadable"] == 1


EMERGENCY = 0
PANIC = b"Kernel panic - not syncing: Fatal exception"


def with_message(text: bytes, facility: int) -> Opened:
    """Return the demo core with a message in place of the last long enough one."""
    found = open_target(TargetSpec(path=CORE, types="btf"))
    ring = found.prog["prb"]
    descs, texts = ring.desc_ring, ring.text_data_ring
    count, size = 1 << descs.count_bits.value_(), 1 << texts.size_bits.value_()
    last = descs.head_id.counter.value_()
    for number in range(last, last - count, -1):
        info = descs.infos[number % count]
        if info.text_len.value_() >= len(text):
            break
    begin = descs.descs[number % count].text_blk_lpos.begin.value_() % size
    overlay.put(found.prog, texts.data.value_() + begin + 8, text)
    for member, value in (("text_len", len(text)), ("facility", facility)):
        place = info.member_(member)
        data = value.to_bytes(sizeof(place.type_), "little")
        overlay.put(found.prog, place.address_, data)
    level = info.type_.member("level")
    first_bit = level.bit_offset % 8
    place = info.address_ + level.bit_offset // 8
    overlay.put(found.prog, place, bytes([EMERGENCY << first_bit]))
    return found


def test_panic_that_a_program_claims() -> None:
    """It is shown as what it is, and nothing follows from it."""
    found = with_message(PANIC, facility=1)
    made = collect_report(found.prog, target=found.target)
    assert (made.crash, made.verdicts) == (None, ())
    assert any(f"(by a program) {PANIC.decode()}" in line for line in made.log)
    found = with_message(PANIC, facility=0)
    crash = collect_report(found.prog, target=found.target).crash
    assert crash is not None
    assert crash.message == PANIC.decode()


@pytest.mark.parametrize(("facility", "is_said"), [(0, True), (1, False)])
def test_message_in_the_header(facility: int, is_said: bool) -> None:
    """Every command shows why the kernel crashed, by the kernel's own words."""
    found = with_message(PANIC, facility)
    overlay.put(found.prog, found.prog["panic_cpu"].address_, bytes(4))
    crash = crash_of(found.prog)
    assert crash is not None
    assert (crash.cpu, crash.message) == (0, PANIC.decode() if is_said else None)


def test_a_dump_of_a_running_kernel_says_so() -> None:
    ran = call(COMMAND, CORE)
    assert "It had not crashed: " in ran.out
    assert "CRASHED" not in ran.out
