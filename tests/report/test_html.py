# SPDX-License-Identifier: LGPL-2.1-or-later

"""The page of a report: what is on it, and how a browser shows it."""

import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from drgn.helpers.linux.pid import find_task
from msatools.commands.report import COMMAND

from msatools.render.report.html import page
from msatools.report.model import TriageReport
from msatools.report.options import ReportOptions
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
    options = ReportOptions(keep_parts=True, memory_map=True)
    return collect_report(found.prog, target=found.target, options=options)


@cache
def text() -> str:
    return page(report())


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
    tags.feed(text())
    assert tags.open == []
    names = {name for name, _ in tags.found}
    assert not names & {"link", "img", "iframe", "object", "b0"}
    for _, attributes in tags.found:
        assert not {"src", "href", "onclick", "onload"} & {*attributes}
    outside = re.findall(r"https?://[^\s\"<]+", text())
    assert {*outside} <= {"http://www.w3.org/2000/svg"}
    assert len(text().encode()) <= MOST_BYTES
    folds = [each.get("id") for name, each in tags.found if name == "details"]
    assert {"verdicts", "memstat", "prstat", "locks", "zombies", "cpus", "log"} <= {
        *folds
    }


def test_a_hostile_name_is_text() -> None:
    assert "&lt;/pre&gt;&lt;b&gt;x&amp;\\x1b" in text()
    assert HOSTILE[:10].decode() not in text()
    assert "\x1b" not in text()


def test_hostile_words_everywhere() -> None:
    """What only a crash has comes from the dump as well."""
    evil = "<script>x</script>\x1b"
    made = report()
    machine = replace(made.machine, host=evil, build=evil)
    target = replace(made.target, path=evil, release=evil)
    shown = page(replace(made, machine=machine, target=target, log=(evil,)))
    assert "<script>x" not in shown
    assert "\x1b" not in shown


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
    inside = escape(text().replace("</head>", f"{PROBE}</head>"))
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
        f"found true; elements 0; {width} wide"
    )
    assert [line for line in ran.stderr.splitlines() if "CONSOLE" in line] == []
