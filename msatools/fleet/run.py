# SPDX-License-Identifier: LGPL-2.1-or-later

"""A run: a report of each dump on Dask's workers, stored as they come."""

from __future__ import annotations

import contextlib
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from distributed import Client, Future

from msatools.fleet.cluster import replace_lost, workers_of
from msatools.fleet.errors import FleetError
from msatools.fleet.identity import Identity, identify
from msatools.fleet.rows import Result, result_of
from msatools.fleet.single import Outcome
from msatools.fleet.store import Results

Report = Callable[[str], Outcome]
"""Returns what came of the dump at a path; workers import it by its name."""

MAX_LOSSES = 5
"""Times that the cluster gives up on a dump, having lost its workers, until it counts
as one that crashes."""

_AHEAD = 4
"""Dumps in the cluster for each that is being read, so that no worker waits."""

_LEAST_AHEAD = 64
_FLUSH_S = 5.0
_MAX_LINE = 1000
_FLUSH_ROWS = 1000


@dataclass
class Progress:
    """How far a run is."""

    total: int
    """Dumps that are named."""

    skipped: int = 0
    """Those that were done before, or are copies."""

    states: Counter[str] = field(default_factory=Counter)
    """Those that are stored or about to be, by state."""

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
        self._losses: Counter[str] = Counter()
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
            while more or self._running:
                more = more and self._submit(waiting)
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

    def _submit(self, waiting: Iterator[Identity]) -> bool:
        """Fill up the cluster; return whether there are dumps left."""
        ahead = max(_AHEAD * workers_of(self._client), _LEAST_AHEAD)
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
            identity = self._running.pop(future)
            if outcome is None:
                self._start(identity)
                continue
            result = result_of(identity, outcome)
            progress.states[result.state] += 1
            self._unsaved.append(result)
        is_late = time.monotonic() >= self._saved_s + _FLUSH_S
        if is_late:
            replace_lost(self._client)
        if is_late or len(self._unsaved) >= _FLUSH_ROWS:
            self._save()

    def _outcomes(
        self, batch: list[Future[Outcome]]
    ) -> Iterator[tuple[Future[Outcome], Outcome | None]]:
        """Yield what came of each dump; ``None`` if it is to be read once more."""
        finished = [future for future in batch if future.status == "finished"]
        found = self._fetched(finished)
        yield from found.items()
        for future in {*batch}.difference(found):
            yield future, self._of_lost(future)

    def _fetched(
        self, futures: list[Future[Outcome]]
    ) -> dict[Future[Outcome], Outcome]:
        """Return what workers have, without what was lost with its worker since."""
        try:
            return dict(zip(futures, self._client.gather(futures), strict=True))
        except Exception:
            found = {}
            for future in futures:
                with contextlib.suppress(Exception):
                    found[future] = self._client.gather(future)
            return found

    def _of_lost(self, future: Future[Outcome]) -> Outcome | None:
        """Return what came of a dump whose workers were lost, or that was not sent."""
        if self._client.status != "running":
            raise FleetError(
                "the scheduler is gone; start it, and the same run again: it goes on"
            )
        identity = self._running[future]
        self._losses[identity.digest] += 1
        if self._losses[identity.digest] < MAX_LOSSES:
            return None
        error = future.exception() if future.status == "error" else None
        why = f"{type(error).__name__}: {error}" if error else "its workers were lost"
        return Outcome(
            state="crashed",
            error=f"the cluster gave it up {MAX_LOSSES} times: {why}"[:_MAX_LINE],
            report=None,
            seconds=0.0,
            worker="",
        )

    def _save(self) -> None:
        unsaved, self._unsaved = self._unsaved, []
        self._saved_s = time.monotonic()
        self._results.write(unsaved)
