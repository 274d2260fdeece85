# SPDX-License-Identifier: LGPL-2.1-or-later

"""A run: a report of each dump on Dask's workers, stored as they come."""

from __future__ import annotations

import contextlib
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from distributed import Client, Future
from msgspec import Struct, field

from msatools.fleet.cluster import replace_lost, workers_of
from msatools.fleet.errors import FleetError
from msatools.fleet.identity import Identity, identify, unknown
from msatools.fleet.rows import VERSION, Result, result_of
from msatools.fleet.single import Outcome, State
from msatools.fleet.store import Results

Report = Callable[[str], Outcome]
"""Returns what came of the dump at a path; workers import it by its name."""

MAX_TRIES = 5
"""Times that a dump is read whose workers are lost, or which changes meanwhile."""

CHANGES = "it changes while it is read; run this again when it is whole"

_AHEAD = 4
"""Dumps in the cluster for each that is being read, so that no worker waits."""

_LEAST_AHEAD = 64
_FETCH_S, _FETCH_ONE_S = 10.0, 1.0
_FLUSH_S = 5.0
_MAX_LINE = 1000
_FLUSH_ROWS = 1000


class Progress(Struct):
    """How far a run is."""

    total: int
    """Dumps that are named."""

    skipped: int = 0
    """Those that were done before, or are copies."""

    states: Counter[str] = field(default_factory=Counter)
    """Those that are stored or about to be, by state."""

    workers: int | None = None
    """Dumps that are read at once; ``None`` if it is not known yet."""

    start_s: float = field(default_factory=time.monotonic)

    @property
    def finished(self) -> int:
        """Dumps of this run that have come to an end."""
        return self.states.total()

    @property
    def failed(self) -> int:
        """Those of them that have no report."""
        return self.finished - self.states["done"]

    @property
    def left(self) -> int:
        """Dumps that are still to come."""
        return self.total - self.skipped - self.finished

    @property
    def rate(self) -> float:
        """Dumps a second."""
        return self.finished / max(time.monotonic() - self.start_s, 1e-9)


class Lost(NamedTuple):
    """Why there is nothing of a dump that was read."""

    why: str
    ended_workers: bool = False
    """Whether it may be what ended them."""


class Run:
    """A run on a cluster.

    :param done: Identities of the dumps that need no report.
    :param saw: Called with the progress every now and then.
    """

    def __init__(
        self,
        client: Client,
        results: Results,
        report: Report,
        done: set[str],
        saw: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._client = client
        self._results = results
        self._report = report
        self._seen = set(done)
        self._saw = saw
        self._finished: queue.SimpleQueue[Future[Outcome]] = queue.SimpleQueue()
        self._running: dict[Future[Outcome], Identity] = {}
        self._suspects: deque[Identity] = deque()
        self._tries: Counter[str] = Counter()
        self._unsaved: list[Result] = []
        self._saved_s = time.monotonic()

    def run(self, paths: list[str]) -> Progress:
        """Have each dump read and stored, and return what came of them.

        However it ends, what has come so far is stored.
        """
        progress = Progress(len(paths))
        waiting = self._to_do(paths, progress)
        try:
            more = True
            while more or self._running or self._suspects:
                progress.workers = workers_of(self._client)
                more = more and self._submit(waiting, progress.workers)
                if self._suspects and not self._running:
                    # Alone, so that it takes no other dump with it.
                    self._start(self._suspects.popleft())
                self._saw(progress)
                self._collect(progress)
        finally:
            self._save()
            # In a cluster that goes on, nothing is left behind.
            with contextlib.suppress(Exception):
                self._client.cancel([*self._running])
        self._saw(progress)
        return progress

    def _to_do(self, paths: Iterable[str], progress: Progress) -> Iterator[Identity]:
        for path in paths:
            identity = identify(path)
            if identity.digest in self._seen:
                progress.skipped += 1
                continue
            self._seen.add(identity.digest)
            yield identity

    def _submit(self, waiting: Iterator[Identity], workers: int) -> bool:
        """Fill up the cluster; return whether there are dumps left."""
        ahead = max(_AHEAD * workers, _LEAST_AHEAD)
        while len(self._running) < ahead:
            identity = next(waiting, None)
            if identity is None:
                return False
            self._start(identity)
        return True

    def _start(self, identity: Identity) -> None:
        future = self._client.submit(self._report, identity.path, pure=False)
        self._running[future] = identity
        future.add_done_callback(self._finished.put)

    def _collect(self, progress: Progress) -> None:
        """Take what has come, waiting until something does or it is time to save."""
        batch = []
        wait_s = self._saved_s + _FLUSH_S - time.monotonic()
        try:
            if self._running:
                batch.append(self._finished.get(timeout=max(wait_s, 0.05)))
            while True:
                batch.append(self._finished.get_nowait())
        except queue.Empty:
            pass
        for future, outcome in self._outcomes(batch):
            result = self._result(self._running.pop(future), outcome, progress)
            if result is not None:
                progress.states[result.state] += 1
                self._unsaved.append(result)
        is_late = time.monotonic() >= self._saved_s + _FLUSH_S
        if is_late:
            replace_lost(self._client)
        if is_late or len(self._unsaved) >= _FLUSH_ROWS:
            self._save()

    def _result(
        self, identity: Identity, outcome: Outcome | Lost, progress: Progress
    ) -> Result | None:
        """Return the rows of a dump; ``None`` if it is read again, or is a copy now."""
        now = identify(identity.path)
        has_changed = now.is_known and now.digest != identity.digest
        if has_changed:
            # Nobody knows which of the two was read.
            outcome = Lost(CHANGES)
            if now.digest in self._seen:
                progress.skipped += 1
                return None
            self._seen.add(now.digest)
        if isinstance(outcome, Lost):
            self._tries[now.path] += 1
            if self._tries[now.path] < MAX_TRIES:
                if outcome.ended_workers:
                    self._suspects.append(now)
                else:
                    self._start(now)
                return None
            identity = unknown(now.path, CHANGES) if has_changed else identity
            outcome = _given_up("failed" if has_changed else "crashed", outcome.why)
        elif outcome.state != "done":
            # It may be gone, and lie elsewhere.
            identity = now
        return result_of(identity, outcome)

    def _outcomes(
        self, batch: list[Future[Outcome]]
    ) -> Iterator[tuple[Future[Outcome], Outcome | Lost]]:
        """Yield what came of each dump."""
        finished = [future for future in batch if future.status == "finished"]
        found = self._fetched(finished)
        for future, outcome in found.items():
            if outcome.version != VERSION:
                raise FleetError(
                    f"the worker on {outcome.worker} has msatools {outcome.version}, "
                    f"and this is {VERSION}; install the same there"
                )
            yield future, outcome
        for future in {*batch}.difference(found):
            yield future, self._why_lost(future)

    def _fetched(
        self, futures: list[Future[Outcome]]
    ) -> dict[Future[Outcome], Outcome]:
        """Return what workers have, without what was lost with its worker since."""
        # What a worker had that is lost since is computed anew, for which gather waits,
        # and there may be no worker until we see to it.
        gather = partial(self._client.gather, futures, asynchronous=True)
        try:
            found = self._client.sync(gather, callback_timeout=_FETCH_S)
            return dict(zip(futures, found, strict=True))
        except Exception:
            some = {}
            for future in futures:
                if future.status == "finished":
                    with contextlib.suppress(Exception):
                        some[future] = future.result(timeout=_FETCH_ONE_S)
            return some

    def _why_lost(self, future: Future[Outcome]) -> Lost:
        """Return why there is nothing of a dump: workers were lost, or cannot do it."""
        if self._client.status != "running":
            raise FleetError(
                "the scheduler is gone; start it, and the same run again: it goes on"
            )
        error = future.exception() if future.status == "error" else None
        if isinstance(error, (AttributeError, ImportError)):
            raise FleetError(
                f"a worker cannot read dumps: {error}; install msatools[fleet] "
                f"{VERSION} there"
            )
        why = f"{type(error).__name__}: {error}" if error else "its workers were lost"
        why = f"the cluster gave it up {MAX_TRIES} times: {why}"[:_MAX_LINE]
        return Lost(why, ended_workers=error is not None)

    def _save(self) -> None:
        unsaved, self._unsaved = self._unsaved, []
        self._saved_s = time.monotonic()
        self._results.write(unsaved)


def _given_up(state: State, error: str) -> Outcome:
    return Outcome(state=state, error=error, report=None, seconds=0.0, worker="")
