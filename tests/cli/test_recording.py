# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a recording shows is what the run showed that made it, and its options choose
from it as they do from a kernel."""

import gzip
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures import lab
from fixtures.demo.questions import words_of_json
from msatools.program import Opened, TargetSpec, open_target
from msatools.render.prstat.columns import COLUMNS
from tests.contract.table import CPUS, LOCKS, MEMSTAT, PRSTAT, ROWS, ZOMBIES, Row
from tests.support.calls import CORE, Ran, call
from tests.support.paused import paused

LABS = {
    "cpus": "cpus-6.12",
    "locks": "locks-6.12",
    "memstat": "memory-6.12",
    "prstat": "tasks-6.12",
    "zombies": "zombies-6.12",
}
"""A dump for each command that has much of what it shows."""

LONG = pytest.mark.long
EACH = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
CHANCE = re.compile(
    r"scanned in \S+|[\d,]+ reads, [\d,]+ bytes read(, \d+ stacks)?(?=;)"
)
"""What depends on the machine, and what a recording reads besides for other views."""

READ = frozenset(("reads", "bytes_read", "memmap_reads", "tasks", "stacks"))
"""What a look at all takes, and one at some does not."""


@pytest.fixture(scope="session")
def dumps() -> Callable[[str], Opened]:
    opened: dict[str, Opened] = {}

    def dump(name: str) -> Opened:
        if name not in opened:
            path = lab.build(LABS[name]).dump("elf")
            opened[name] = open_target(TargetSpec(path=str(path), types="btf"))
        return opened[name]

    return dump


@pytest.fixture(scope="session")
def recordings(
    dumps: Callable[[str], Opened], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Row, str], Path]:
    """Recordings of the dumps, by how they are made, each made once."""
    made: dict[tuple[str, str], Path] = {}

    def recording(row: Row, how: str) -> Path:
        if (row.name, how) not in made:
            file = tmp_path_factory.mktemp("recordings") / "file"
            ran = recorded(row, file, *how.split(), opened=dumps(row.name))
            assert (ran.status, ran.err) == (0, "")
            made[row.name, how] = file
        return made[row.name, how]

    return recording


def untouched(spec: TargetSpec) -> Opened:
    pytest.fail(f"{spec} is opened")


def replayed(row: Row, file: Path, *words: str) -> Ran:
    """What is shown of a recording, for which nothing else is opened."""
    return call(row.command, *words, str(file), opening=untouched)


def recorded(row: Row, file: Path, *words: str, opened: Opened | None = None) -> Ran:
    """Record, and give what the run showed: of the demo, or what is open."""
    if opened is None:
        return call(row.command, "--record", str(file), *words)
    target = ("--qemu", "guest") if opened.target.live else ("dump",)
    record = ("--record", str(file), *target, *words)
    return call(row.command, *record, opening=lambda _: opened)


# --- the same, whether recorded or not

ALL = "-o " + ",".join(COLUMNS)

CHOSEN = [
    *((CPUS, "", words) for words in ("", "-i", "-P 0-1", "--set default", "--info")),
    *((CPUS, "-v", words) for words in ("-v", "--sets -v", "-o all -v")),
    *((LOCKS, "", words) for words in ("", "-v", "--state D", "--type mutex,rwsem")),
    *((LOCKS, "", words) for words in ("--min-age 30 --chains", "--holders -v")),
    *(
        (LOCKS, "--stacks", words)
        for words in ("--stacks --type futex", "--dot", "-n 3")
    ),
    *((MEMSTAT, "-v --by process,slab,order", words) for words in ("", "-v")),
    *((MEMSTAT, "--by process,slab,order", words) for words in ("--by order,process",)),
    *((MEMSTAT, "--frag --sections", words) for words in ("--frag", "--sections")),
    *((PRSTAT, "", words) for words in ("", "-mL", "-m -n 9", "-a -Z")),
    *((PRSTAT, "", words) for words in ("--class LCK", "--class LCK --load")),
    *((PRSTAT, "", words) for words in ("--sort RSS,-PID", "-L --sort +VCX -n 30")),
    *((PRSTAT, "", words) for words in ("-p 1", "-p 1 -mL", "--state DZ --min-age 10")),
    *((PRSTAT, "", words) for words in ("-u 0 -P 0 --user-tasks", "--why LAT,IRQ")),
    *((PRSTAT, "--children", words) for words in ("--children", "--sort CUSR", ALL)),
    *((ZOMBIES, "", words) for words in ("", "-v", "--tree", "--by cgroup", "-n 2")),
    *((PRSTAT, "", words) for words in ("--by user,class,comm", "--cgroup /")),
    (PRSTAT, "--by ns", "--by ns,container --ns 4026531836"),
    *((ZOMBIES, "", words) for words in ("--verdict never-waits", "--by ns")),
    (ZOMBIES, "", "--cgroup /"),
]
"""How something is recorded, and what is asked of the recording."""


def chosen() -> Iterator[object]:
    """Yield those, the first of each command for `make test`."""
    known: set[str] = set()
    for row, how, words in CHOSEN:
        yield pytest.param(row, how, words, marks=LONG if row.name in known else ())
        known.add(row.name)


@pytest.mark.parametrize(
    ("row", "how", "words"),
    [*chosen()],
    ids=lambda value: value.name if isinstance(value, Row) else value or "all",
)
def test_recorded_is_as_direct(
    row: Row,
    how: str,
    words: str,
    dumps: Callable[[str], Opened],
    recordings: Callable[[Row, str], Path],
) -> None:
    """Byte for byte; in JSON all but what it took."""
    opened, file = dumps(row.name), recordings(row, how)

    def direct(*more: str) -> Ran:
        return call(row.command, "dump", *more, opening=lambda _: opened)

    ran = replayed(row, file, *words.split())
    assert (ran.status, ran.err) == (0, "")
    assert CHANCE.sub("", ran.out) == CHANCE.sub("", direct(*words.split()).out)
    if "--dot" in words:
        return
    as_json = ("--json", *words_of_json(row.command, words.split()))
    found, wanted = replayed(row, file, *as_json), direct(*as_json)
    assert without_cost(found.json) == without_cost(wanted.json)


def without_cost(report: dict[str, Any]) -> dict[str, Any]:
    coverage = {k: v for k, v in report["coverage"].items() if k not in READ}
    coverage = {key: count for key, count in coverage.items() if count}
    return {**report, "coverage": coverage, "scan_ns": None}


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.name in LABS], ids=lambda row: row.name
)
def test_intervals(row: Row, dumps: Callable[[str], Opened], tmp_path: Path) -> None:
    """All samples at once: JSON Lines as they were, text with their times of day."""
    dump = lab.build(LABS[row.name]).dump("elf")
    file = tmp_path / "recording"
    with paused(dump, tmp_path) as address:
        guest = open_target(TargetSpec(qemu=address, types="btf"))
        words = ("0.01", "2", "--json")
        ran = recorded(row, file, *words, opened=guest)
    assert (ran.status, ran.err) == (0, "")
    assert [sample["interval_ns"] for sample in ran.samples] == [0, 0]
    assert replayed(row, file, "--json").out == ran.out
    text = replayed(row, file).out
    assert len(re.findall(r"^\d\d:\d\d:\d\d$", text, re.MULTILINE)) == 2
    assert len(re.findall(rf"^msa-{row.name}: .* CPU, ", text, re.MULTILINE)) == 2
    # Of one recording, the first sample and the last: nothing has happened.
    found = call(row.command, "--diff", str(file), str(file), "--json")
    assert (found.status, found.err) == (0, "")
    assert found.json["schema"] == f"msatools.{row.name}-diff/1"
    assert found.json["elapsed_ns"] == 0
    assert not any(found.json.get("changes", {}).values())
    assert not any(each["delta_pages"] for each in found.json.get("classes", ()))


# --- the file


@pytest.fixture
def demo_recording(tmp_path: Path) -> Callable[[Row], Path]:
    def record(row: Row) -> Path:
        file = tmp_path / f"{row.name}.rec"
        assert recorded(row, file, CORE).err == ""
        return file

    return record


def test_file_is_for_its_owner(demo_recording: Callable[[Row], Path]) -> None:
    """It can be read without us: each line is JSON."""
    file = demo_recording(CPUS)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    header, sample = map(json.loads, gzip.decompress(file.read_bytes()).splitlines())
    assert (header["format"], header["command"]) == ("msatools.recording/1", "cpus")
    assert sample["report"]["cpus"]


def test_no_file_is_written_over(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("precious")
    link.symlink_to(tmp_path / "elsewhere")
    for path in (file, link):
        ran = recorded(CPUS, path, CORE)
        said = f"msa-cpus: {path}: already there; remove it, or name another file\n"
        assert (ran.status, ran.out, ran.err) == (1, "", said)
    assert file.read_text() == "precious"
    assert not (tmp_path / "elsewhere").exists()
    ran = recorded(CPUS, tmp_path / "no" / "folder", CORE)
    assert (ran.status, ran.out) == (1, "")
    assert "no such file or directory; record to another file" in ran.err


def test_no_sample_leaves_no_file(tmp_path: Path) -> None:
    ran = recorded(PRSTAT, tmp_path / "file", CORE, "-p", "99999")
    assert (ran.status, ran.out) == (1, "")
    assert "pid 99999: no such task" in ran.err
    assert not (tmp_path / "file").exists()


@EACH
def test_recording_of_another_command(
    row: Row, demo_recording: Callable[[Row], Path]
) -> None:
    whose = CPUS if row is not CPUS else PRSTAT
    file = demo_recording(whose)
    said = f"{file}: a recording of msa-{whose.name}; see it with msa-{whose.name}"
    for ran in (replayed(row, file), call(row.command, "--diff", str(file), "-")):
        assert (ran.status, ran.out) == (1, "")
        assert ran.err == f"msa-{row.name}: {said} {file}\n"


REFUSED = {
    "-s vmlinux": "-s: ",
    "--types btf": "--types: ",
    "--debuginfod": "--debuginfod: ",
    "--kernel 1": "--kernel: ",
    "--vmcoreinfo x": "--vmcoreinfo: ",
    "--sandbox": "--sandbox: ",
    "--record other": "--record: ",
    "-k": "a second target",
    "--qemu x": "a second target",
    "--budget 5": "--budget: it is for samples",
}
REFUSED_OF = {
    "cpus": {
        "-v": "tasks were not recorded",
        "--sets": "",
        "-o icsw": "",
        "--plan 1": "--plan: recordings do not have it",
    },
    "locks": {
        "--stacks": "--stacks: was not recorded",
        "--cgroup /": "--cgroup: recordings do not have it",
        "--container 0123456789ab": "--container: recordings do not have it",
    },
    "memstat": {
        "--by process": "--by process: was not recorded",
        "--frag": "--frag: was not recorded",
        "-v": "-v: was not recorded",
        "--map": "--map: recordings do not have it",
        "-j 2": "-j: ",
    },
    "prstat": {
        "--children": "what children used was not recorded",
        "-o CUSR": "what children used was not recorded",
        "--ns 1": "namespaces were not recorded",
        "--by ns": "namespaces were not recorded",
        "--stacks": "--stacks: recordings do not have it",
        "--states": "--states: recordings do not have it",
        "--folded age": "--folded: recordings do not have it",
        "--folded age --module ext4": "--folded: recordings do not have it",
    },
    "report": {
        "--full": "--full: recordings do not have it",
        "--html page": "--html: recordings do not have it",
        "--fingerprint": "--fingerprint: recordings do not have it",
    },
    "whatis": {"--waits": "--waits: recordings do not have it"},
    "zombies": {
        "-p 1": "-p: recordings do not have it",
        "--ns 1": "--ns: recordings do not have it",
        "--leaks": "--leaks: was not recorded",
        "--cost": "--cost: was not recorded",
    },
}


@EACH
def test_what_is_not_recorded_is_refused(
    row: Row, demo_recording: Callable[[Row], Path]
) -> None:
    """In one line, and never left out."""
    file = demo_recording(row)
    refused = {**REFUSED, **REFUSED_OF.get(row.name, {})}
    if row.command.operands is None:
        refused |= dict.fromkeys(("5", "5 3"), "a recording has intervals of its own")
    for words, said in refused.items():
        ran = replayed(row, file, *words.split())
        assert (ran.status, ran.out) == (2, ""), words
        assert said in ran.err
        assert ran.err.count("\n") == 1


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    for row, words in ((PRSTAT, "--stacks"), (MEMSTAT, "--map"), (ZOMBIES, "-p 1")):
        ran = recorded(row, tmp_path / "file", CORE, *words.split())
        assert (ran.status, ran.out) == (2, "")
        assert "recordings do not have it" in ran.err
    assert not (tmp_path / "file").exists()


# --- damaged, and hostile


@pytest.fixture
def lines(demo_recording: Callable[[Row], Path]) -> Callable[[Row], list[bytes]]:
    """The header and the sample of a recording of the demo."""
    return lambda row: gzip.decompress(demo_recording(row).read_bytes()).splitlines()


def packed(*lines: bytes) -> bytes:
    return b"".join(gzip.compress(line + b"\n") for line in lines)


def test_cut_short(lines: Callable[[Row], list[bytes]], tmp_path: Path) -> None:
    """What is whole is shown, and that it was cut is said."""
    header, sample = lines(CPUS)
    whole, file = packed(header, sample), tmp_path / "cut"
    file.write_bytes(whole)
    wanted = replayed(CPUS, file).out
    file.write_bytes(whole + gzip.compress(sample)[:-9])
    said = f"msa-cpus: {file}: cut short after 1 sample\n"
    assert replayed(CPUS, file) == Ran(0, wanted, said)
    assert replayed(CPUS, file, "--strict") == Ran(3, wanted, said)
    for length in (len(whole) - 5, len(packed(header)), len(packed(header)) + 20):
        file.write_bytes(whole[:length])
        ran = replayed(CPUS, file)
        assert (ran.status, ran.out) == (1, "")
        assert f"{file}: cut short in its first sample; record it again" in ran.err


def changed(line: bytes, change: Callable[[Any], object]) -> bytes:
    value = json.loads(line)
    change(value)
    return json.dumps(value, separators=(",", ":")).encode()


def hostile(header: bytes, sample: bytes, row: Row) -> Iterator[tuple[str, bytes]]:
    """Yield what is wrong with a recording, and the recording."""
    yield "no JSON", packed(header, b"{")
    yield "no object", packed(header, b"[1]")
    yield "deep", packed(header, b"[" * 100_000)
    yield "empty line", packed(header, b"")
    yield "no report", packed(header, b'{"taken_s":1.0}')
    yield "no text", packed(header, b"\xff\xfe")
    yield "garbage", packed(header) + b"garbage"
    yield "checksum", packed(header, sample)[:-8] + bytes(8)
    yield "time", packed(header, sample.replace(b'"taken_s":', b'"taken_s":1e300,"x":'))
    for key in json.loads(sample)["report"]:
        for value in (7, "x", [], {}, None, [None], {"x": 1}, -1, 1 << 80):

            def put(found: Any, key: str = key, value: object = value) -> None:
                found["report"][key] = value

            yield f"{key} {value!r}", packed(header, changed(sample, put))


@EACH
def test_damaged(row: Row, lines: Callable[[Row], list[bytes]], tmp_path: Path) -> None:
    """Shown, if nothing is wrong with the types; else one line, and no traceback."""
    header, sample = lines(row)
    file, refused = tmp_path / "damaged", 0
    for what, data in hostile(header, sample, row):
        file.write_bytes(data)
        ran = replayed(row, file, "--json")
        assert ran.status in (0, 1), what
        if ran.status == 1:
            refused += 1
            assert re.fullmatch(rf"msa-{row.name}: [^\n]+; [^\n]+\n", ran.err), what
            assert "unexpected" not in ran.err, what
            # One that lost its answers may not be damaged, but of other addresses.
            said = "damaged" if row.command.operands is None else "damaged|not recorded"
            assert re.search(said, ran.err), what
    assert refused > 20


def test_arrays_that_do_not_fit(
    lines: Callable[[Row], list[bytes]], tmp_path: Path
) -> None:
    """Those of prstat, by which rows are found."""
    header, sample = lines(PRSTAT)
    columns = json.loads(sample)["report"]["kept"]["columns"]
    wrong: list[Callable[[Any], object]] = [
        lambda column: column["values"].pop(),
        lambda column: column.update(shape=[1, len(column["values"])]),
        lambda column: column.update(shape=[1 << 40]),
        lambda column: column.update(dtype="object"),
        lambda column: column.update(dtype="S9999"),
        lambda column: column.update(values="x"),
        lambda column: column["values"].__setitem__(0, 1 << 70),
        lambda column: column["values"].__setitem__(0, [1]),
    ]
    for name in columns:
        for change in wrong:

            def put(found: Any, name: str = name, change: Any = change) -> None:
                change(found["report"]["kept"]["columns"][name])

            (tmp_path / "file").write_bytes(packed(header, changed(sample, put)))
            for words in ("-m", "-L", "--load -a -Z"):
                ran = replayed(PRSTAT, tmp_path / "file", *words.split())
                assert (ran.status, ran.err.count("\n")) in ((0, 0), (1, 1))
                assert "unexpected" not in ran.err


def test_numbers_out_of_range(
    lines: Callable[[Row], list[bytes]], tmp_path: Path
) -> None:
    header, sample = lines(PRSTAT)
    for name in ("class", "cgroup", "class_age_bound"):

        def put(found: Any, name: str = name) -> None:
            column = found["report"]["kept"]["columns"][name]
            column["values"][0] = 100

        (tmp_path / "file").write_bytes(packed(header, changed(sample, put)))
        ran = replayed(PRSTAT, tmp_path / "file")
        assert (ran.status, ran.out, ran.err.count("\n")) == (1, "", 1)
        assert "sample 1 is damaged" in ran.err


def test_names_are_escaped(lines: Callable[[Row], list[bytes]], tmp_path: Path) -> None:
    header, sample = lines(PRSTAT)

    def put(found: Any) -> None:
        found["report"]["kept"]["columns"]["comm"]["values"][0] = "a\x1b[31m\n[b]"
        found["report"]["notes"] = [{"code": "x", "text": "\x1b[31m"}]

    (tmp_path / "file").write_bytes(packed(header, changed(sample, put)))
    ran = replayed(PRSTAT, tmp_path / "file")
    assert (ran.status, ran.err) == (0, "")
    assert all(line.isprintable() for line in ran.out.splitlines())
    assert r"a\x1b[31m\x0a[b]" in ran.out


@pytest.mark.parametrize(
    ("row", "former"), [(CPUS, b"sched_class"), (LOCKS, b"task_class")]
)
def test_keys_of_former_versions(
    row: Row, former: bytes, lines: Callable[[Row], list[bytes]], tmp_path: Path
) -> None:
    header, sample = lines(row)
    old = sample.replace(b'"class":', b'"%s":' % former)
    assert old != sample
    shown = []
    for number, written in enumerate((sample, old)):
        file = tmp_path / f"{number}"
        file.write_bytes(packed(header, written))
        ran = replayed(row, file, "--json")
        assert (ran.status, ran.err) == (0, "")
        shown.append(ran.out)
    assert shown[0] == shown[1]


def test_other_formats(lines: Callable[[Row], list[bytes]], tmp_path: Path) -> None:
    header, sample = lines(CPUS)
    file = tmp_path / "file"
    file.write_bytes(packed(header.replace(b"recording/1", b"recording/2"), sample))
    said = "msatools.recording/2, where msatools.recording/1 is known; read it with"
    assert said in replayed(CPUS, file).err
    other = re.sub(rb'"version":"[^"]+"', rb'"version":"9\\u001b"', header)
    file.write_bytes(packed(other, sample.replace(b'"cpus":', b'"cores":')))
    ran = replayed(CPUS, file)
    assert "sample 1 is damaged, or of msatools 9" in ran.err
    assert ran.err.strip().isprintable()
    # A file of gzip that is no recording is a dump that is none.
    file.write_bytes(gzip.compress(b"hello"))
    ran = call(CPUS.command, str(file), opening=open_target)
    assert ran.status == 1
    assert "recording" not in ran.err


def test_bomb(lines: Callable[[Row], list[bytes]], tmp_path: Path) -> None:
    """What unpacks to more than a report takes is not unpacked."""
    header, _ = lines(CPUS)
    file = tmp_path / "file"
    file.write_bytes(packed(header) + gzip.compress(bytes(1 << 21)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("msatools.cli.recording._MAX_LINE", 1 << 20)
        ran = replayed(CPUS, file)
    assert (ran.status, ran.out) == (1, "")
    assert "a sample of more than" in ran.err


def test_full_disk() -> None:
    """Nothing that is said to be recorded is lost without a word."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("msatools.cli.recording.os.open", lambda *_: os.dup(descriptor))
        patch.setattr("msatools.cli.recording.os.unlink", lambda _: None)
        ran = recorded(CPUS, Path("/dev/shm/none"), CORE)
    os.close(descriptor)
    assert ran.status == 1
    assert "no space left on device; record to another file" in ran.err
