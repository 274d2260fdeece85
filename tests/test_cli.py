# SPDX-License-Identifier: LGPL-2.1-or-later

import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from itertools import pairwise
from pathlib import Path

import pytest

from fixtures import lab
from msatools.cli import UsageError, Words, make_parser, parse_words
from tests.conftest import Msa
from tests.support import probe
from tests.support.madeelf import image
from tests.support.terminal import Terminal

PROBE = [sys.executable, "-m", "tests.support.probe"]
FOOTER = r"msa-probe: \d+\.\d\d s CPU, \d+\.\d % of one CPU, \d+\.\d MiB"


@pytest.fixture(scope="session")
def dump(run_612: lab.Run) -> list[str]:
    """The words that name a dump."""
    return [str(run_612.elf), "-s", str(run_612.vmlinux)]


@pytest.fixture
def guest(live_qmp: str, run_612: lab.Run) -> list[str]:
    """The words that name a guest that runs."""
    return ["--qemu", live_qmp, "-s", str(run_612.vmlinux)]


def run_probe(*words: str, **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*PROBE, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,  # type: ignore[call-overload]
    )


def start_probe(*words: str) -> "subprocess.Popen[str]":
    """Start msa-probe and wait until it collects."""
    process = subprocess.Popen(
        [*PROBE, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "collecting\n"
    return process


# The words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", Words()),
        ("vmcore", Words("vmcore")),
        ("5", Words(None, 5.0)),
        ("0.5 3", Words(None, 0.5, 3)),
        ("vmcore 5 3", Words("vmcore", 5.0, 3)),
        ("5 vmcore 3", Words("vmcore", 5.0, 3)),
        ("5 3 vmcore", Words("vmcore", 5.0, 3)),
        ("./5", Words("./5")),
        ("./5 5", Words("./5", 5.0)),
        (".5 +2", Words(None, 0.5, 2)),
        ("1e1 007", Words(None, 10.0, 7)),
        ("1_000", Words("1_000")),
        ("0x5", Words("0x5")),
        ("5s", Words("5s")),
        ("nanny", Words("nanny")),
        ("/proc/kcore 1", Words("/proc/kcore", 1.0)),
    ],
)
def test_words(words: str, expected: Words) -> None:
    assert parse_words(words.split()) == expected


@pytest.mark.parametrize(
    "words",
    [
        "0", "0.0", "-5", "-0.5", "nan", "NaN", "inf", "Infinity", "1e999",
        "5 0", "5 -1", "5 1.5", "5 nan", "5 1e3",
        "5 3 2", "vmcore vmcore", "./5 ./6",
    ],
)  # fmt: skip
def test_words_that_make_no_sense(words: str) -> None:
    with pytest.raises(UsageError):
        parse_words(words.split())


@pytest.mark.parametrize(
    "words",
    [
        "-5", "nan", "-nan", "a b", "-k vmcore", "-c vmcore -k", "--qemu x vmcore",
        "vmcore 5", "5 vmcore", "-c vmcore 5 2", "5 0", "5 3 1", "--nonsense", "-x",
        "--types c", "-s x --types btf", "--debuginfod --types btf", "--by cpu", "--by",
        "-s", "--jso",
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line_and_status_2(msa: Msa, words: str) -> None:
    done = msa(*words.split())
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"msa-memstat: .+; see msa-memstat --help\n", done.stderr)


def test_options_may_follow_the_words(dump: list[str]) -> None:
    done = run_probe(*dump, "--json", "--lost", "7")
    assert json.loads(done.stdout)["coverage"] == {"lost": 7}


def test_error_without_standard_error_is_in_no_output(msa_memstat: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" --by foo 2>&-', msa_memstat],
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, b"")


def test_help_is_narrow_and_has_usage_and_examples(msa: Msa) -> None:
    for option in ("-h", "--help"):
        done = msa(option)
        assert done.returncode == 0
        assert done.stdout.startswith("USAGE: msa-memstat [")
        assert "\nEXAMPLES:\n  msa-memstat vmcore " in done.stdout
        assert max(map(len, done.stdout.splitlines())) < 80


def test_help_inside_drgn_has_no_targets() -> None:
    text = make_parser(probe.COMMAND, in_drgn=True).format_help()
    assert "vmcore" not in text
    assert "--qemu" not in text
    assert "%probe --lines 3" in text


def test_version(msa: Msa) -> None:
    import msatools

    assert msa("--version").stdout == f"{msatools.__version__}\n"


# Exit status and errors


def one_line(done: "subprocess.CompletedProcess[str]", status: int = 1) -> str:
    """Check the promise for errors and give the line."""
    assert done.returncode == status
    assert done.stdout == ""
    assert re.fullmatch(r"msa-\w+: [^\n]+: [^\n]+; [^\n]+\n", done.stderr)
    return done.stderr


def test_errors_are_one_line_and_status_1(
    msa: Msa, tmp_path: Path, run_612: lab.Run
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello\n")
    other = str(tmp_path / "vmlinux")
    (tmp_path / "vmlinux").write_bytes(image(kind=2))
    elf = str(run_612.elf)
    lines = {
        ("/nonexistent",): "no such file",
        (str(tmp_path),): "a directory",
        (str(tmp_path / "empty"),): "empty",
        (str(tmp_path / "text"),): "not a dump",
        (other,): "not a core",
        (elf, "-s", other): "another build",
        (elf, "-s", "/nonexistent"): "no such file",
        (elf, "--types", "dwarf"): "no debug info found",
        ("--qemu", "/nonexistent"): "No such file",
    }
    for words, why in lines.items():
        assert why in one_line(msa(*words))


def test_not_permitted(tmp_path: Path, run_612: lab.Run) -> None:
    """A user who is not root, in a Python that such a user can read."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    dump = tmp_path / "vmcore"
    dump.write_bytes(b"KDUMP   ")
    dump.chmod(0o600)
    descriptor = os.open(dump, os.O_PATH)
    # The path is given as a descriptor, for no other user gets into tmp_path.
    code = (
        "import os, sys\n"
        "from msatools.commands.memstat import main\n"
        "import msatools.render.memstat, encodings.idna\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        f"sys.argv = ['msa-memstat', '/proc/self/fd/{descriptor}']\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        pass_fds=[descriptor],
    )
    os.close(descriptor)
    assert "permission denied" in one_line(done)


def test_control_characters_in_errors_are_escaped(msa: Msa) -> None:
    line = one_line(msa("/nonexistent\x1b[31m\n[red]"))
    assert r"/nonexistent\x1b[31m\x0a[red]: no such file" in line


def test_unexpected_error_is_one_line_unless_debug(dump: list[str]) -> None:
    done = run_probe(*dump, "--fail")
    assert done.returncode == 1
    line = done.stderr.removeprefix("collecting\n")
    assert re.fullmatch(r"msa-probe: unexpected RuntimeError: [^\n\x1b]+; .*\n", line)
    done = run_probe(*dump, "--fail", "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.endswith(line)


def test_memory_that_no_report_can_do_without(dump: list[str]) -> None:
    done = run_probe(*dump, "--fault")
    assert done.returncode == 1
    assert "it lacks memory that the report needs" in done.stderr
    assert "Traceback" not in done.stderr


def test_strict(dump: list[str]) -> None:
    assert run_probe(*dump, "--lost", "1").returncode == 0
    assert run_probe(*dump, "--lost", "1", "--strict").returncode == 3
    assert run_probe(*dump, "--lost", "0", "--strict").returncode == 0


def test_strict_looks_at_every_sample(guest: list[str]) -> None:
    assert run_probe(*guest, "0.1", "2", "--lost", "1", "--strict").returncode == 3
    assert run_probe(*guest, "0.1", "2", "--strict").returncode == 0


# Output


def test_closed_pipe_is_quiet(dump: list[str]) -> None:
    process = start_probe(*dump, "--lines", "100000")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(10) == -signal.SIGPIPE
    assert process.stderr.read() == ""


def test_pipe_closed_before_the_help(msa_memstat: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [msa_memstat, "--help"], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert done.returncode == -signal.SIGPIPE
    assert done.stderr == b""


def test_full_disk_is_one_line(dump: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*PROBE, *dump], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr == (
        "collecting\n"
        "msa-probe: standard output: No space left on device; print it elsewhere\n"
    )


def test_json_is_one_line(dump: list[str]) -> None:
    done = run_probe(*dump, "--json")
    assert done.stdout.count("\n") == 1
    report = json.loads(done.stdout)
    assert list(report)[:6] == [
        "schema", "target", "taken_at_ns", "interval_ns", "coverage", "notes",
    ]  # fmt: skip
    assert report["schema"] == "msatools.probe/1"
    assert report["target"]["path"] == dump[0]
    assert report["target"]["crash"] is None


# Intervals and signals


def test_samples(guest: list[str]) -> None:
    started = time.monotonic()
    done = run_probe(*guest, "0.3", "3", "--json")
    assert time.monotonic() - started > 0.9
    assert done.returncode == 0
    samples = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(samples) == 3
    for before, after in pairwise(samples):
        assert after["jiffies"] == before["jiffies"] + after["delta_jiffies"]


def test_samples_tell_what_they_cost(guest: list[str]) -> None:
    words = ("0.5", "2", "--json", "--take", "0.2", "--spin", "0.3")
    started_ns = time.monotonic_ns()
    done = run_probe(*guest, *words)
    took_ns = time.monotonic_ns() - started_ns
    costs = [json.loads(line)["cost"] for line in done.stdout.splitlines()]
    for cost in costs:
        assert cost["cpu_ns"] >= 0.3e9
        assert cost["elapsed_ns"] >= 0.5e9
        assert cost["wall_ns"] > 0.5e9
        assert cost["cpu_ns"] < cost["wall_ns"] + 0.5e9  # what opening has cost
        assert 10 << 20 < cost["peak_bytes"] < 1 << 30
    assert sum(cost["wall_ns"] for cost in costs) < took_ns
    assert "cost" not in json.loads(run_probe(*guest, "--json").stdout)


def test_budget(guest: list[str]) -> None:
    """0.1 s of each half second: two samples a second, not ten.

    What one sample takes comes before what makes up for it.
    """
    words = ("0.1", "6", "--json", "--spin", "0.1", "--budget", "20")
    done = run_probe(*guest, *words)
    costs = [json.loads(line)["cost"] for line in done.stdout.splitlines()][1:]
    cpu_ns, wall_ns = (
        sum(cost[key] for cost in costs) for key in ("cpu_ns", "wall_ns")
    )
    assert cpu_ns > 0.5e9
    assert cpu_ns < 0.2 * wall_ns + 0.15e9


def test_budget_of_samples_within_an_interval(guest: list[str]) -> None:
    words = ("2", "1", "--json", "--budget", "10")
    samples = ("--period", "0.01", "--sample-spin", "0.05")
    done = run_probe(*guest, *words, *samples)
    report = json.loads(done.stdout)
    assert 2 <= report["samples"] <= 4


def test_text_samples_carry_the_time_of_day(guest: list[str]) -> None:
    lines = run_probe(*guest, "0.1", "2").stdout.splitlines()
    assert len(lines) == 6
    for when, what, cost in (lines[:3], lines[3:]):
        assert re.fullmatch(r"\d\d:\d\d:\d\d", when)
        assert what.startswith("line 0 ")
        assert re.fullmatch(FOOTER, cost)


def test_collection_slower_than_the_interval(guest: list[str]) -> None:
    done = run_probe(*guest, "0.01", "2", "--take", "0.2", "--json")
    assert len(done.stdout.splitlines()) == 2


def samples_of(*words: str) -> list[int]:
    done = run_probe(*words, "--json")
    assert done.returncode == 0
    return [json.loads(line)["samples"] for line in done.stdout.splitlines()]


def test_samples_within_an_interval(guest: list[str]) -> None:
    """One in each tenth of a second; the last may be past the end, or just not."""
    assert samples_of(*guest, "0.5", "2") == [0, 0]
    found = samples_of(*guest, "1", "2", "--period", "0.1")
    assert all(9 <= count <= 10 for count in found), found


def test_samples_that_take_long(guest: list[str]) -> None:
    """They are one after the other, and none is made up for.

    Of the first interval the fourth has a tenth of a second left, or not if others
    take the CPUs.
    """
    found = samples_of(
        *guest, "1", "2", "--period", "0.01", "--sample-take", "0.3"
    )  # fmt: skip
    assert 3 <= found[0] <= 4
    assert 2 <= found[1] <= 4


def test_lost_samples_cost_a_note(guest: list[str]) -> None:
    words = (*guest, "0.5", "1", "--period", "0.1", "--sample-fault")
    done = run_probe(*words, "--json")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    (note,) = report["notes"]
    assert note["code"] == "samples-lost"
    assert note["text"].startswith(f"{report['samples']} samples ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_shot_ends_by_the_signal(dump: list[str], number: int) -> None:
    process = start_probe(*dump, "--take", "30")
    process.send_signal(number)
    out, err = process.communicate(timeout=10)
    assert process.returncode == -number
    assert (out, err) == ("", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("take", ["0", "30"])
def test_interval_run_ends_cleanly(guest: list[str], number: int, take: str) -> None:
    process = start_probe(*guest, "0.2", "--json", "--take", take)
    if take == "0":
        assert process.stdout is not None
        json.loads(process.stdout.readline())
    process.send_signal(number)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 0
    assert "Traceback" not in err
    assert all(json.loads(line) for line in out.splitlines())


def test_strict_counts_after_a_clean_end(guest: list[str]) -> None:
    process = start_probe(*guest, "0.1", "--json", "--strict", "--lost", "1")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 3


def test_ignored_signals_stay_ignored(dump: list[str]) -> None:
    process = subprocess.Popen(
        ["nohup", *PROBE, *dump, "--take", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert process.stderr is not None
    while process.stderr.readline() != "collecting\n":
        pass
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "jiffies" in out


def test_progress_shows_after_a_second_and_is_erased(dump: list[str]) -> None:
    slow = Terminal([*PROBE, *dump, "--take", "1.5"])
    assert slow.end() == 0
    shown = slow.seen.index("\rprobe: 33 %")
    assert slow.seen.index("\r\x1b[K", shown) < slow.seen.index("line 0")
    quick = Terminal([*PROBE, *dump, "--take", "0.5"])
    assert quick.end() == 0
    assert "%" not in quick.seen


def test_no_progress_where_there_is_no_terminal(dump: list[str]) -> None:
    assert run_probe(*dump, "--take", "1.5").stderr == "collecting\n"


def test_progress_is_erased_when_stopped(dump: list[str]) -> None:
    terminal = Terminal([*PROBE, *dump, "--take", "30"])
    terminal.read_until("33 %")
    terminal.press("\x03")
    assert terminal.end() == -signal.SIGINT
    assert terminal.seen.rindex("\r\x1b[K") > terminal.seen.rindex("%")


@pytest.mark.parametrize(("key", "status"), [("q", 0), ("\x03", 0)])
def test_keys_that_end_an_interval_run(guest: list[str], key: str, status: int) -> None:
    terminal = Terminal([*PROBE, *guest, "0.2"])
    terminal.read_until("line 0")
    terminal.press(key)
    assert terminal.end() == status
    assert "Traceback" not in terminal.seen


@pytest.mark.parametrize(
    "words", [("--take", "0.5"), ("--period", "0.01", "--sample-take", "0.5")]
)
def test_key_pressed_while_it_is_busy(guest: list[str], words: tuple[str, ...]) -> None:
    """Collecting or sampling takes longer than there is between."""
    words = ("0.1", "--no-redraw", "--lines", "1", *words)
    terminal = Terminal([*PROBE, *guest, *words])
    terminal.read_until("line 0")
    terminal.press("q")
    assert terminal.end() == 0
    assert terminal.seen.count("line 0") <= 2


def test_terminal_of_another_session(guest: list[str]) -> None:
    terminal = Terminal([*PROBE, *guest, "0.2", "1"], is_own=False)
    assert terminal.end() == 0
    assert "line 0" in terminal.seen


def test_terminal_modes_are_restored(guest: list[str]) -> None:
    terminal = Terminal([*PROBE, *guest, "0.2"])
    before = termios.tcgetattr(terminal.fd)
    terminal.read_until("line 0")
    during = termios.tcgetattr(terminal.fd)
    terminal.press("q")
    assert terminal.end() == 0
    assert before[3] & termios.ICANON
    assert not during[3] & termios.ICANON
    assert terminal.modes == before


@pytest.mark.parametrize(
    ("words", "added"),
    [
        ((), set()),
        (("--by", "node"), {"by"}),
        (("--sections",), {"sections"}),
        (("--frag",), {"frag"}),
        (("--map",), {"map"}),
        (("--unattributed",), {"unattributed"}),
        (("-v",), {"vmalloc"}),
    ],
)
def test_keys_of_json(
    run_612: lab.Run, msa: Msa, words: tuple[str, ...], added: set[str]
) -> None:
    """The keys of the contract, and more for what is asked for."""
    done = msa("--json", *words, "-s", run_612.vmlinux, str(run_612.elf))
    report = json.loads(done.stdout)
    always = {
        *("schema", "target", "taken_at_ns", "interval_ns", "coverage", "notes"),
        *("pages", "classes", "checks", "managed_pages", "physical_pages"),
        *("scan_ns", "changes"),
    }
    assert set(report) == always | added
    assert report["schema"] == "msatools.memstat/1"
    assert set(report["classes"][0]) == {"name", "pages", "bytes"}
    keys = {"name", "walk_pages", "counter", "kernel_pages", "difference"}
    assert set(report["checks"][0]) == {*keys, "explained_by"}
    for section in report.get("sections", ()):
        assert section["memmap"].startswith("0xffff")
    for groups in report.get("by", {}).values():
        assert set(groups[0]) == {"key", "name", "pages", "classes"}


def test_strict_tells_a_dump_that_lacks_something(
    run_612: lab.Run, msa: Msa, tmp_path: Path
) -> None:
    words = ("--strict", "-s", run_612.vmlinux)
    assert msa(*words, str(run_612.elf)).returncode == 0
    cut = tmp_path / "vmcore"
    subprocess.run(["cp", "--sparse=always", str(run_612.elf), cut], check=True)
    os.truncate(cut, cut.stat().st_size - (1 << 19))
    done = msa(*words, cut)
    assert done.returncode == 3
    assert "truncated" in done.stdout
    assert "100% covered" not in done.stdout
