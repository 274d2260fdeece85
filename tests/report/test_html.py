# SPDX-License-Identifier: LGPL-2.1-or-later

"""The page of a report: what is on it, and how a browser shows it."""

import re
import shutil
import subprocess
from dataclasses import dataclass, field
from functools import cache
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from drgn.helpers.linux.pid import find_task
from msatools.commands.report import COMMAND
from msgspec.structs import replace

from fixtures import lab
from msatools.kernel.report import Note
from msatools.locks.report import LocksReport
from msatools.program.model import Source
from msatools.render.blocks import Block, Column, Table, advice, free_text, line
from msatools.render.locks.tree import MARKS
from msatools.render.report.html import page, portable
from msatools.render.report.html_blocks import (
    MAX_LINES,
    MAX_ROWS,
    PageText,
    page_blocks,
)
from msatools.report.model import (
    CrashDetails,
    NextStep,
    ReportOptions,
    ReportSection,
    TriageReport,
    TriageVerdict,
    command_line,
)
from msatools.report.report import collect_report
from tests.support import overlay
from tests.support.calls import CORE, Opened, TargetSpec, call, open_target

HOSTILE = b"</pre><b>x&\x1b[2J"
MOST_BYTES = 2_000_000
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
SECONDS = 300


def opened() -> Opened:
    """Return the demo core with a task whose name is markup."""
    found = open_target(TargetSpec(path=CORE, types="btf"))
    name = find_task(found.prog, 210).comm.address_
    overlay.put(found.prog, name, HOSTILE[:15] + b"\0")
    return found


@cache
def report() -> TriageReport:
    found = opened()
    options = ReportOptions(keep_parts=True, memory_map=True, stacks=True)
    return collect_report(found.prog, target=found.target, options=options)


@cache
def shown() -> str:
    return page(report())


@cache
def report_of(dump: str) -> TriageReport:
    path = str(lab.build(dump).kept)
    found = open_target(TargetSpec(path=path, types="btf"))
    options = ReportOptions(keep_parts=True, stacks=True)
    return collect_report(found.prog, target=found.target, options=options)


@cache
def page_of(dump: str) -> str:
    return page(report_of(dump))


class Tags(HTMLParser):
    """Checks that all elements are closed, and collects their attributes."""

    VOID = frozenset({"meta", "input", "br", "rect", "path"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID or tag == "path":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_one_file_that_needs_nothing() -> None:
    tags = Tags()
    tags.feed(shown())
    assert tags.open == []
    names = {name for name, _ in tags.found}
    assert not names & {"link", "img", "iframe", "object", "b0"}
    for _, attributes in tags.found:
        assert not {"src", "href", "onclick", "onload"} & {*attributes}
    outside = re.findall(r"https?://[^\s\"<]+", shown())
    assert {*outside} <= {"http://www.w3.org/2000/svg"}
    assert len(shown().encode()) <= MOST_BYTES
    folds = [each.get("id") for name, each in tags.found if name == "details"]
    assert {"verdicts", "memstat", "prstat", "locks", "zombies", "cpus", "log"} <= {
        *folds
    }


def test_a_hostile_name_is_shown() -> None:
    assert "&lt;/pre&gt;&lt;b&gt;x&amp;\\x1b" in shown()
    assert HOSTILE[:10].decode() not in shown()
    assert "\x1b" not in shown()


def test_hostile_words_everywhere() -> None:
    """What only a crash has comes from the dump as well."""
    evil = "<script>x</script>\x1b"
    made = report()
    machine = replace(made.machine, host=evil, build=evil)
    target = replace(made.target, path=evil, release=evil)
    note = Note("evil", evil)
    made = replace(made, machine=machine, target=target, log=(evil,), notes=(note,))
    evil_page = page(replace(made, crash=crash(message=evil, frames=(evil,))))
    assert evil_page.count("&lt;script&gt;x") >= 5
    assert "<script>x" not in evil_page
    assert "\x1b" not in evil_page


def test_command(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    ran = call(COMMAND, "--html", str(path), CORE)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.splitlines()[-1] == f"page written to {path}"
    assert path.read_text().startswith("<!DOCTYPE html>")
    unwritable = str(tmp_path / "nowhere" / "page.html")
    ran = call(COMMAND, "--html", unwritable, CORE)
    assert ran.status == 1
    assert ran.err.count("\n") == 1
    assert unwritable in ran.err


def crash(**facts: object) -> CrashDetails:
    usual: dict[str, object] = {
        "cause": "null-dereference",
        "message": "BUG",
        "function": "cm_read_state",
        "module": "crashmodule",
        "taints": "OE",
        "cpu": 0,
        "pid": 186,
        "comm": "reader",
        "frames": ("cm_read_state+0x5",),
        "fingerprint": "0",
        "time_ns": None,
    }
    return CrashDetails(**usual | facts)  # type: ignore[arg-type]


def verdict(**facts: object) -> TriageVerdict:
    usual: dict[str, object] = {
        "code": "io-stuck",
        "severity": "warning",
        "confidence": "evidence",
        "text": "tasks wait for vda",
        "evidence": (),
        "see": "msa-locks vmcore",
    }
    return TriageVerdict(**usual | facts)  # type: ignore[arg-type]


@dataclass
class Section(HTMLParser):
    """The texts of a section of the page."""

    html: str
    id: str
    headers: list[str] = field(default_factory=list)
    cells: list[tuple[str, str]] = field(default_factory=list)
    """Class and text of each cell of a table."""

    terms: dict[str, str] = field(default_factory=dict)
    """The legend."""

    lines: list[str] = field(default_factory=list)
    """Preformatted lines."""

    def __post_init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._text = ""
        self._style = ""
        self._term = ""
        self.feed(self.html)
        assert self.terms or self.cells or self.lines, f"no section {self.id}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "details" and (self._depth or given.get("id") == self.id):
            self._depth += 1
        self._text = (
            "" if tag != "span" or "line" in str(given.get("class")) else self._text
        )
        self._style = given.get("class") or ""

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        if not self._depth:
            return
        if tag == "th":
            self.headers.append(self._text)
        elif tag == "td":
            self.cells.append((self._style, self._text))
        elif tag == "dt":
            self._term = self._text
        elif tag == "dd":
            self.terms[self._term] = self._text
        elif tag == "span" and self._text.endswith("\n"):
            self.lines.append(self._text.rstrip("\n"))
        elif tag == "details":
            self._depth -= 1


def heading(html: str) -> str:
    found = re.search(r"<h1>(.*?)</h1>", html)
    assert found is not None
    return unescape(re.sub(r"<[^>]*>", "", found[1]))


def test_headline_of_each_kind() -> None:
    made = replace(report(), crash=None, verdicts=())
    worst = verdict(severity="critical", confidence="exact", text="a < b")
    cases = {
        "crashed NULL dereference in cm_read_state [crashmodule]": replace(
            made, crash=crash(), verdicts=(verdict(code="panic"), worst)
        ),
        "critical: io-stuck a < b": replace(made, verdicts=(worst, verdict())),
        "warning (circumstantial): io-stuck tasks wait for vda": replace(
            made, verdicts=(verdict(),)
        ),
        "warning (likely): io-stuck tasks wait for vda": replace(
            made, verdicts=(verdict(confidence="likely"),)
        ),
        "No problem found": made,
        "No problem found in what could be read": replace(
            made, sections={**made.sections, "locks": ReportSection(error="lost")}
        ),
    }
    for words, each in cases.items():
        assert heading(page(each)) == words


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("/home/me/a dump/vmcore", "msa-locks vmcore --io"),
        ("/home/me/vm core", "msa-locks 'vm core' --io"),
        ("../case's/5", "msa-locks ./5 --io"),
        ("/home/me/-v", "msa-locks ./-v --io"),
        ("vmcore", "msa-locks vmcore --io"),
    ],
)
def test_commands_are_without_local_paths(path: str, command: str) -> None:
    made = report()
    target = replace(
        made.target,
        path=path,
        sources=(Source("kernel", "dwarf", "/home/me/debug/vmlinux"),),
    )
    line = command_line(target, "locks", ("--io",))
    note = Note("parts", f"{path} lacks {Path(path).parent}/vm2")
    changed = replace(
        made,
        target=target,
        verdicts=(verdict(see=line),),
        next=(NextStep(command=line, why="-"),),
        notes=(note,),
        sections={**made.sections, "locks": ReportSection(error=f"{path}: gone")},
    )
    found = portable(changed)
    expected = f"{command} -s vmlinux".replace(" --io -s vmlinux", " -s vmlinux --io")
    assert {found.verdicts[0].see, found.next[0].command} == {expected}
    html = page(changed)
    assert "/home/me" not in html
    assert "case's" not in unescape(html)
    assert unescape(html).count(expected) == 2


def test_page_of_a_dump_has_no_local_path() -> None:
    assert str(Path(CORE).parent) not in shown()
    assert f"from {Path(CORE).name}: vmcore" in shown()


def test_memory_has_its_indentation() -> None:
    memory = Section(shown(), "memstat")
    styles = {text: style.split() for style, text in memory.cells}
    assert "in1" in styles["buddy"]
    assert "in1" in styles["unattributed"]
    assert not {"in1", "in2"} & {*styles["Kernel"], *styles["Managed"]}


def test_reason_of_a_difference_is_apart() -> None:
    memory = Section(shown(), "memstat")
    reasons = [text for _, text in memory.cells if re.match(r"[+-][\d,]+ ", text)]
    assert reasons
    assert all(re.match(r"[+-][\d,]+  \S", text) for text in reasons)
    rule = re.search(r"th, td \{[^}]*\}", shown())
    assert rule is not None
    assert "white-space: pre" in rule[0]


ADVICE = re.compile(
    r"-v (or a wider terminal )?shows|-n COUNT|--by \w+ lists|--chains shows"
)


@pytest.mark.parametrize("dump", [None, "locks-6.12", "zombies-6.12", "cpus-6.12"])
def test_no_options_of_a_terminal(dump: str | None) -> None:
    html = shown() if dump is None else page_of(dump)
    assert not ADVICE.search(unescape(html))
    assert len(html.encode()) <= MOST_BYTES


@pytest.mark.parametrize("dump", [None, "locks-6.12", "zombies-6.12", "cpus-6.12"])
def test_legends(dump: str | None) -> None:
    """Each column, class, state and mark that a section shows has its meaning."""
    html = shown() if dump is None else page_of(dump)
    parts = (report() if dump is None else report_of(dump)).parts
    assert parts is not None
    assert parts.prstat is not None
    assert parts.locks is not None
    tasks = Section(html, "prstat")
    assert tasks.headers[:3] == ["NOW", "THREADS", "WHAT THEY DO"]
    assert {*tasks.headers[3:]} <= tasks.terms.keys()
    assert parts.prstat.totals.states.keys() <= tasks.terms.keys()
    words = [cell for _, cell in tasks.cells]
    for name in parts.prstat.totals.classes:
        assert len(words[words.index(name) + 2]) > 5
    for name in ("memstat", "cpus"):
        section = Section(html, name)
        assert {header for header in section.headers if header} <= section.terms.keys()
    if parts.zombies is not None and parts.zombies.zombies:
        dead = Section(html, "zombies")
        assert {h for h in dead.headers if not h.startswith("[")} <= dead.terms.keys()
    if parts.locks.waits:
        check_marks(Section(html, "locks"), parts.locks)


def check_marks(section: Section, locks: LocksReport) -> None:
    lines = "\n".join(section.lines)
    for mark in MARKS.values():
        before_lock = re.search(rf"^ *{re.escape(mark)} \w", lines, re.MULTILINE)
        if before_lock or f"owner {mark}" in lines:
            assert mark in section.terms
    assert {wait.state for wait in locks.waits} <= section.terms.keys()
    for word in ("ROOT", "HERD", "INVERSION", "NO KNOWN OWNER", "OTHERS"):
        is_used = re.search(rf"^{word}\b", lines, re.MULTILINE)
        assert bool(is_used) == (word in section.terms), word


def test_a_hang_has_what_each_word_of_its_legend_is_of() -> None:
    """Nothing is in a legend that the page does not use."""
    terms = Section(page_of("locks-6.12"), "locks").terms.keys()
    assert {"ROOT", "R", "W", "=", "~", "?", "D", "S"} <= terms
    assert not {"Z", "X", "P"} & terms
    doubts = Section(page_of("locks-6.12"), "verdicts").terms
    assert "circumstantial" in doubts
    assert "(evidence)" not in page_of("locks-6.12")


def test_stacks_of_hung_tasks() -> None:
    parts = report_of("locks-6.12").parts
    assert parts is not None
    assert parts.locks is not None
    assert parts.stacks is not None
    hung = {wait.pid for wait in parts.locks.waits if wait.state == "D"}
    html = page_of("locks-6.12")
    found = re.search(
        r'<details id="stacks">.*?(?=<details id="memstat")', html, re.DOTALL
    )
    assert found is not None
    heads = re.findall(
        r'<details class="stack find"><summary>(.*?)</summary>', found[0]
    )
    named = {int(pid) for head in heads for pid in re.findall(r"\b(\d+) [a-z]", head)}
    assert hung <= named
    # Tasks that are alike stand together.
    assert len(heads) < len(hung)
    together = [head for head in heads if "mkdir-make" in head]
    assert len(together) == 1
    assert "look-make" in together[0]
    assert " in <code>filename_create</code>: " in together[0]
    assert "rwsem_down_write_slowpath" in found[0]
    # Threads that are merely asleep have none here.
    idle = {wait.pid for wait in parts.locks.waits if wait.comm.startswith("cond")}
    assert not idle & named


def test_dark_is_for_screens() -> None:
    """A print is black on white, however the screen is."""
    dark = re.findall(r"@media ([^{]*prefers-color-scheme: dark[^{]*)", shown())
    assert dark
    assert all(media.startswith("screen and ") for media in dark)
    printed = shown().partition("@media print {")[2].partition("</style>")[0]
    assert "--ink: #000000; --paper: #ffffff" in printed


def test_no_task_is_hung() -> None:
    assert 'id="stacks"' not in shown()


def test_what_is_left_out_is_counted() -> None:
    rows = [(f"{number}", "x" * 9000) for number in range(MAX_ROWS + 9)]
    notes = {0: (line("  why", advice("-v shows more")),)}
    columns = (Column("N", "right"), free_text("WORDS"))

    def made(verbose: bool) -> list[Block]:
        lines = [
            line(f"… {n} more", advice("-v shows them")) for n in range(MAX_LINES * 2)
        ]
        return [Table(columns, rows, notes=notes), *(lines if verbose else lines[:3])]

    # What a dump says is left as it is, if it looks like that.
    said = "task named: -v shows it"
    (words,) = page_blocks(lambda _: [line(said, advice("-v shows it"))])
    assert isinstance(words, PageText)
    assert [piece.text for piece in words.lines[0].pieces] == [said]

    table, lines = page_blocks(made)
    assert not isinstance(table, PageText)
    assert isinstance(lines, PageText)
    assert len(table.rows) == MAX_ROWS
    assert table.left_out == "… 9 more rows"
    assert [piece.text for piece in table.rows[0].notes[0].pieces] == ["  why"]
    assert len(table.rows[0].cells[1].text) < 9000
    assert [line.pieces[0].text for line in lines.lines] == [
        "… 0 more",
        "… 1 more",
        "… 2 more",
    ]


def test_lines_of_a_section_are_bounded() -> None:
    blocks = page_blocks(lambda _: [line(f"line {n}") for n in range(MAX_LINES + 50)])
    assert all(isinstance(block, PageText) for block in blocks)
    lines = [
        line for block in blocks if isinstance(block, PageText) for line in block.lines
    ]
    assert len(lines) == MAX_LINES + 1
    assert lines[-1].pieces[0].text == "… 50 more lines"


PROBE = """
<script>
const top_ = parent.document;
window.onerror = (words) => { top_.title = "ERROR " + words; };
window.addEventListener("load", () => {
  const all = [...document.querySelectorAll("details")];
  const memory = document.getElementById("memstat");
  const say = [];
  say.push("closed " + !memory.open);
  memory.querySelector("summary").click();
  say.push("opens " + memory.open);
  document.getElementById("close").click();
  say.push("all closed " + all.every((each) => !each.open));
  document.getElementById("open").click();
  say.push("all open " + all.every((each) => each.open));
  const width = document.documentElement.scrollWidth;
  say.push("fits " + (width <= window.innerWidth));
  const wrapped = [...document.querySelectorAll("pre, p, summary, dl, li, h1")];
  const fits = (each) => each.scrollWidth <= each.clientWidth + 1 || !each.clientWidth;
  say.push("wraps " + wrapped.every(fits));
  const search = document.getElementById("search");
  search.value = "</pre><b>x";
  search.dispatchEvent(new Event("input"));
  const hits = document.querySelectorAll(".find:not(.gone)").length;
  say.push("found " + (hits > 0 && hits < document.querySelectorAll(".find").length));
  say.push("elements " + document.querySelectorAll("pre b, td b").length);
  say.push(window.innerWidth + " wide");
  if (!top_.title.startsWith("ERROR")) top_.title = say.join("; ");
});
</script>
"""


@pytest.mark.long
@pytest.mark.parametrize("width", [390, 1440])
def test_in_a_browser(width: int, tmp_path: Path) -> None:
    """It opens without an error, folds, finds words, and fits phones and desks."""
    if BROWSER is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    path = tmp_path / "page.html"
    # The browser's own window is never as narrow as a phone's.
    inside = escape(shown().replace("</head>", f"{PROBE}</head>"))
    path.write_text(
        f"<!DOCTYPE html><title>-</title>"
        f'<iframe style="width:{width}px; height:900px; border:0" srcdoc="{inside}">'
        "</iframe>"
    )
    ran = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *(f"--user-data-dir={tmp_path}/user", "--enable-logging=stderr"),
            *("--virtual-time-budget=5000", "--window-size=1600,1000"),
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    title = re.search(r"<title>(.*?)</title>", ran.stdout)
    assert title is not None
    assert title[1] == (
        "closed true; opens true; all closed true; all open true; fits true; "
        "wraps true; "
        f"found true; elements 0; {width} wide"
    )
    assert [line for line in ran.stderr.splitlines() if "CONSOLE" in line] == []
