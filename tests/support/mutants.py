# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Mutation testing: change single lines of msatools at random, and run the tests.

    python -m tests.support.mutants [-n 60] [--seed N] [--only K ...] [--list]

Mutants are shared among packages by their lines of code, and made in copies of the
checkout. For each mutant, the tests of ``make test`` run until the first failure: first
the tests of its package in one process (those that import the module first), then all
others in two processes. A failing test must pass without the mutation; if it does not,
its file is left out from then on.

The exit status is 1 if fewer than 90 % of the mutants were noticed, and 2 if tests
failed without a mutation.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from random import Random, randrange

from tests.support.mutations import (
    Mutation,
    changes_code,
    choose,
    code_lines,
    find_mutations,
    share,
)

ROOT = Path(__file__).parents[2]
PRODUCT = ("msatools/**/*.py", "commands/**/*.py", "msatools/memory/_classify.c")
WANTED = 0.9
LIMIT = 1800
"""Seconds for the whole suite, enough on a busy machine."""
TEST_LIMIT = 300
"""Seconds for a single test, with cached guests; a mutant that takes longer hangs."""
MEMORY = 12 << 30
"""Limit on a process's memory in bytes; guests need a few GiB."""
NO_TESTS = 5
"""pytest's exit status if no tests were selected."""

_BUILD_COMPILED = ("setup.py", "--quiet", "build_ext", "--inplace")
_HUNG_TEST = re.compile(r'File "[^"]*/(tests/[^"]*/test_\w+\.py)", line \d+ in (\w+)')
_NOT_RUN = ("tests/live/", "tests/bench/", "tests/support/")
"""Folders without tests of ``make test``."""


class EndedError(Exception):
    """Something else killed the tests, such as the kernel's OOM killer."""


@dataclass(frozen=True)
class Mutant:
    """A mutation, and its number for ``--only``."""

    number: int
    mutation: Mutation
    source: str
    """The file's original text."""

    @property
    def package(self) -> str:
        return package_of(self.mutation.path)

    def describe(self) -> str:
        mutation = self.mutation
        return (
            f"{self.number:3}  {mutation.path}:{mutation.line}  {mutation.kind}\n"
            f"     - {mutation.line_of(self.source).strip()}\n"
            f"     + {mutation.changed_line(self.source).strip()}"
        )


@dataclass(frozen=True)
class Outcome:
    """The result of testing a mutant."""

    mutant: Mutant
    noticed_by: str | None
    """The first test that failed, or another description of how it was noticed."""
    seconds: float
    note: str = ""

    def describe(self) -> str:
        verdict = self.note or "MISSED"
        if self.noticed_by is not None:
            verdict = f"killed by {self.noticed_by}"
        return f"{self.mutant.describe()}\n     {verdict}  ({self.seconds:.0f} s)"


def package_of(path: str) -> str:
    """Return the folder of a Python file; a C file is a package of its own."""
    return path if path.endswith(".c") else path.rpartition("/")[0]


def choose_mutants(root: Path, count: int, seed: int, below: str = "") -> list[Mutant]:
    """Choose mutants of all packages; the same sources and seed give the same mutants.

    :param below: Prefix of the mutants' paths.
    """
    sources: dict[str, str] = {}
    for pattern in PRODUCT:
        for path in sorted(root.glob(pattern)):
            name = path.relative_to(root).as_posix()
            if name.startswith(below):
                sources[name] = path.read_text()
    lines: Counter[str] = Counter()
    found: dict[str, list[Mutation]] = defaultdict(list)
    for path, source in sources.items():
        lines[package_of(path)] += code_lines(path, source)
        found[package_of(path)] += find_mutations(path, source)

    def works(mutation: Mutation) -> bool:
        source = sources[mutation.path]
        # C is compared after it is built; see try_one.
        return mutation.path.endswith(".c") or changes_code(
            source, mutation.apply(source)
        )

    random = Random(seed)
    chosen = [
        mutation
        for package, wanted in share(lines, count).items()
        for mutation in choose(found[package], wanted, random, works)
    ]
    return [
        Mutant(number, mutation, sources[mutation.path])
        for number, mutation in enumerate(chosen, 1)
    ]


def tests_of(path: str, tests: Iterable[str], texts: dict[str, str]) -> list[str]:
    """Return the test files of a module's package, the likeliest to fail first.

    :param texts: path of a test file -> its text
    """
    parts = path.partition(".")[0].split("/")
    module = parts[-1]
    if parts[0] == "commands":
        package, imported = module, f"msatools.commands.{module}"
    else:
        package, imported = parts[1] if len(parts) > 2 else "", ".".join(parts)
    folder = f"tests/{'memory' if package == 'memstat' else package}/"
    rendered = parts[2] if package == "render" and len(parts) > 3 else package
    own = (
        *((folder, f"tests/render/test_{rendered}") if package else ("tests/test_",)),
        f"tests/render/test_{module}",
        "tests/test_contract.py",
        "tests/truth/",
    )

    def order(test: str) -> tuple[bool, bool, bool, str]:
        named = Path(test).stem == f"test_{module}"
        imports = re.search(rf"\b{re.escape(imported)}\b", texts[test]) is not None
        return not named, not imports, not test.startswith(folder), test

    return sorted((test for test in tests if test.startswith(own)), key=order)


class Copy:
    """A copy of the checkout with its own environment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.root = directory / "c"
        self.python = self.root / ".venv/bin/python"
        self.process: subprocess.Popen[str] | None = None
        self.stopped = False
        self._clock = time.time()
        _copy_sources(self.root)
        _copy_environment(self.root)

    def write(self, path: str, text: str) -> None:
        """Write a file so that Python does not use its old bytecode."""
        target = self.root / path
        target.write_text(text)
        # Bytecode is valid for a source's size and modification time in seconds.
        self._clock += 2
        os.utime(target, (self._clock, self._clock))
        if path.endswith(".c"):
            self.run(*_BUILD_COMPILED, limit=LIMIT)

    def compiled(self) -> list[bytes]:
        """Return the contents of the compiled extensions."""
        return [path.read_bytes() for path in self.root.glob("msatools/**/*.so")]

    def test(self, words: Sequence[str], limit: float) -> tuple[int, list[str], str]:
        """Run tests until the first failure; return status, failed tests and output."""
        cache = self.directory / "p"
        shutil.rmtree(cache, ignore_errors=True)
        status, output = self.run(
            *("-m", "pytest", "-x", "-q", "--tb=no", "-o", f"cache_dir={cache}"),
            *("-o", f"faulthandler_timeout={TEST_LIMIT}"),
            *("-o", "faulthandler_exit_on_timeout=true"),
            *("--basetemp", str(self.directory / "t"), *words),
            limit=limit,
        )
        path = cache / "v/cache/lastfailed"
        failed = list(json.loads(path.read_text())) if path.exists() else []
        return status, failed, output

    def run(self, *words: str, limit: float) -> tuple[int, str]:
        """Run Python in the copy; return its status and output.

        :raises TimeoutExpired: after *limit* seconds
        :raises EndedError: if it is killed
        """
        if self.stopped:
            raise KeyboardInterrupt
        environment = os.environ | {"PYTHONHASHSEED": "0"}
        for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTEST_ADDOPTS"):
            environment.pop(name, None)
        with subprocess.Popen(
            [self.python, *words],
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
            start_new_session=True,
        ) as process:
            self.process = process
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (MEMORY, MEMORY))
            try:
                output, _ = process.communicate(timeout=limit)
            finally:
                _end(process)
                self.process = None
        if process.returncode == -signal.SIGKILL:
            raise EndedError
        return process.returncode, output

    def stop(self) -> None:
        self.stopped = True
        if self.process is not None:
            _end(self.process)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a session of processes, even if its leader has exited."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _copy_sources(root: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    compiled = [path.relative_to(ROOT) for path in ROOT.glob("msatools/**/*.so")]
    for name in [*listed.stdout.split("\0")[:-1], *compiled]:
        source, target = ROOT / name, root / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def _copy_environment(root: Path) -> None:
    """Copy the environment, with msatools installed from the copy of the checkout."""
    old = Path(sys.prefix)
    new = root / ".venv"
    site = next(old.glob("lib/python3*/site-packages"))
    for path in (old / "pyvenv.cfg", *old.glob("bin/*")):
        _copy_with_paths(path, new / path.relative_to(old), root)
    for path in site.iterdir():
        target = new / path.relative_to(old)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.name == "__pycache__":
            continue
        if path.is_file() and path.name.startswith("__editable__"):
            _copy_with_paths(path, target, root)
        else:
            target.symlink_to(path)


def _copy_with_paths(source: Path, target: Path, root: Path) -> None:
    """Copy a link or a script, replacing paths of the checkout by the copy's."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target, follow_symlinks=False)
    if source.is_symlink():
        return
    data = source.read_bytes()
    if str(ROOT).encode() in data:
        target.write_bytes(data.replace(str(ROOT).encode(), str(root).encode()))


class Trial:
    """Tests mutants in several copies in parallel."""

    def __init__(self, package_only: bool, limit: float) -> None:
        self.package_only = package_only
        self.limit = limit
        self.tests = sorted(
            path.relative_to(ROOT).as_posix()
            for path in ROOT.glob("tests/**/test_*.py")
            if not path.relative_to(ROOT).as_posix().startswith(_NOT_RUN)
        )
        self.texts = {path: (ROOT / path).read_text() for path in self.tests}
        self.passing: set[str] = set()
        """Tests that passed without a mutation."""
        self.broken: set[str] = set()
        """Files with tests that failed without a mutation."""

    def run(self, mutants: Sequence[Mutant], jobs: int) -> Iterator[Outcome]:
        with (
            tempfile.TemporaryDirectory(
                prefix="mutants-", ignore_cleanup_errors=True
            ) as scratch,
            ThreadPoolExecutor(jobs) as pool,
        ):
            copies = [Copy(Path(scratch) / str(number)) for number in range(jobs)]
            free: SimpleQueue[Copy] = SimpleQueue()
            for copy in copies:
                free.put(copy)

            def one(mutant: Mutant) -> Outcome | None:
                copy = free.get()
                try:
                    return self.try_one(copy, mutant)
                finally:
                    free.put(copy)

            futures = [pool.submit(one, mutant) for mutant in mutants]
            try:
                for future in as_completed(futures):
                    if (outcome := future.result()) is not None:
                        yield outcome
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for copy in copies:
                    copy.stop()

    def try_one(self, copy: Copy, mutant: Mutant) -> Outcome | None:
        """Test one mutant; ``None`` if it compiles to the same code."""
        began = time.monotonic()
        mutation, source = mutant.mutation, mutant.source
        before = copy.compiled() if mutation.path.endswith(".c") else None
        copy.write(mutation.path, mutation.apply(source))
        try:
            if before is not None and before == copy.compiled():
                return None
            while True:
                noticed_by = self._first_failure(copy, mutation.path, began)
                if noticed_by is None or not noticed_by.startswith("tests/"):
                    break
                copy.write(mutation.path, source)
                if self._passes(copy, noticed_by):
                    break
                copy.write(mutation.path, mutation.apply(source))
            note = ""
        except subprocess.TimeoutExpired:
            noticed_by, note = None, "NOT DONE within the limit"
        except EndedError:
            noticed_by, note = None, "NOT DONE: the tests were killed"
        finally:
            if not copy.stopped:
                copy.write(mutation.path, source)
        return Outcome(mutant, noticed_by, time.monotonic() - began, note)

    def _first_failure(self, copy: Copy, path: str, began: float) -> str | None:
        tests = [test for test in self.tests if test not in self.broken]
        first = tests_of(path, tests, self.texts)
        rest = [test for test in tests if test not in first]
        parallel = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
        stages = [first, [*parallel, *rest]]
        for words in stages[: 1 if self.package_only else 2]:
            left = self.limit - (time.monotonic() - began)
            status, failed, output = copy.test(words, max(left, 1))
            if status not in (0, NO_TESTS):
                return failed[0] if failed else _how_it_failed(status, output)
        return None

    def _passes(self, copy: Copy, test: str) -> bool:
        """Return whether a test passes unmutated; if not, leave out its file."""
        if test not in self.passing:
            words = [test] if "::" in test else ["--collect-only", test]
            status, _, output = copy.test(words, LIMIT)
            if status not in (0, NO_TESTS):
                print(f"{test} fails without a mutation, too:\n{output}", flush=True)
                self.broken.add(test.partition("::")[0])
                return False
            self.passing.add(test)
        return True


def _how_it_failed(status: int, output: str) -> str:
    if "Timeout (" in output and (hung := _HUNG_TEST.search(output)):
        return f"hanging in {hung[1]}::{hung[2]}"
    lines = [line for line in output.splitlines() if line.strip()] or [""]
    return f"status {status}: {lines[-1].strip()}"


def table(outcomes: Iterable[Outcome]) -> list[str]:
    """Return a line per package: mutants tried and noticed."""
    tried: Counter[str] = Counter()
    noticed: Counter[str] = Counter()
    for outcome in outcomes:
        for name in (outcome.mutant.package, "all"):
            tried[name] += 1
            noticed[name] += outcome.noticed_by is not None
    width = max(map(len, tried), default=0)
    names = sorted(tried, key=lambda name: (name == "all", name))
    return [f"{'package':{width}}  tried  noticed     %"] + [
        f"{name:{width}}  {tried[name]:5}  {noticed[name]:7}"
        f"  {100 * noticed[name] / tried[name]:4.0f}"
        for name in names
    ]


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.mutants",
        description="Change lines of the product at random; do the tests notice?",
    )
    number = {"type": int, "metavar": "N"}
    parser.add_argument("-n", dest="count", default=60, **number, help="mutants")
    parser.add_argument("--seed", **number, help="which; printed if it is chosen")
    parser.add_argument("--only", nargs="+", default=[], **number, help="by number")
    parser.add_argument(
        "--below",
        default="",
        metavar="PATH",
        help="all of modules whose path begins so",
    )
    parser.add_argument("--list", action="store_true", help="print them, test nothing")
    parser.add_argument("-j", dest="jobs", default=2, **number, help="at once")
    parser.add_argument(
        "--limit", default=LIMIT, **number, help="seconds a mutant (%(default)s)"
    )
    parser.add_argument(
        "--package-only", action="store_true", help="run only its package's tests"
    )
    args = parser.parse_args(words)
    seed = randrange(10**6) if args.seed is None else args.seed
    mutants = [
        mutant
        for mutant in choose_mutants(ROOT, args.count, seed, args.below)
        if mutant.number in (args.only or [mutant.number])
    ]
    below = f" --below {args.below}" if args.below else ""
    print(f"-n {args.count} --seed {seed}{below}: {len(mutants)} mutants", flush=True)
    if args.list:
        print(*(mutant.describe() for mutant in mutants), sep="\n")
        return 0
    # Raise KeyboardInterrupt, so that the tests are ended as well.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outcomes = []
    trial = Trial(args.package_only, args.limit)
    for outcome in trial.run(mutants, args.jobs):
        outcomes.append(outcome)
        print(outcome.describe(), flush=True)
    print(*table(outcomes), sep="\n")
    missed = [outcome for outcome in outcomes if outcome.noticed_by is None]
    if missed:
        print("not noticed: --only", *(outcome.mutant.number for outcome in missed))
    if trial.broken:
        print("failed without a mutation, too:", *sorted(trial.broken))
        return 2
    return int(len(outcomes) - len(missed) < WANTED * len(outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
