# SPDX-License-Identifier: LGPL-2.1-or-later

"""Report on each dump with Dask's workers, and store the results as they come."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import dask
from dask.system import cpu_count
from distributed import Client, Future, LocalCluster
from distributed.system import MEMORY_LIMIT
from msgspec import Struct, field

from msatools.fleet.dumps import VERSION, Identity, Result, identify, result_of, unknown
from msatools.fleet.single import Bounds, FleetError, Outcome, State
from msatools.fleet.store import Results

# --- The Dask cluster that reads the dumps: started on this machine, or existing.


CONNECT = "30s"
"""Timeout for connecting to the scheduler, and between it and workers."""

_SETTINGS = {
    # Dask restarts a task whose worker is lost; Run counts such losses as well.
    "distributed.scheduler.allowed-failures": 20,
    # A worker holds only the task that it runs: if it ends, no other is suspected.
    "distributed.scheduler.worker-saturation": 1.0,
    "distributed.comm.timeouts.connect": CONNECT,
    # Workers have no results to speak of, and must not write them anywhere.
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.target": False,
    "distributed.admin.log-length": 100,
    "distributed.deploy.lost-worker-timeout": "5s",
}


def cores() -> int:
    """Return the number of cores that this process may use, by its cgroup as well."""
    return cpu_count()


def memory_for(workers: int) -> int:
    """Return the memory that one of *workers* on this machine may take, in bytes."""
    # An eighth stays for this process, the scheduler and all else.
    return int(MEMORY_LIMIT * 7 // 8 // max(workers, 1))


@contextlib.contextmanager
def local(
    workers: int, bounds: Bounds, settings: Mapping[str, object] | None = None
) -> Iterator[Client]:
    """Yield a client of a cluster on this machine, whose workers nannies watch.

    All connections use TLS with a key made for this cluster: whoever can send a worker
    tasks can do anything that the worker can.

    :param settings: Further settings of Dask.
    :raises FleetError: if workers do not start
    """
    _silence_logs()
    with (
        _no_modules_here(),
        dask.config.set({**_SETTINGS, **(settings or {})}),
        _start(workers, bounds) as cluster,
        Client(cluster) as client,
    ):
        yield client


def _start(workers: int, bounds: Bounds) -> LocalCluster:
    try:
        return LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            memory_limit=max(bounds.memory_bytes, 1 << 30),
            # Without bokeh there are health checks only.
            dashboard_address="127.0.0.1:0",
            worker_dashboard_address="127.0.0.1:0",
            security=True,
            silence_logs=logging.CRITICAL,
        )
    # Any error of a nanny may surface here.
    except Exception as error:
        cause = _first_cause(error)
        raise FleetError(
            f"the workers do not start: {type(cause).__name__}: {cause}; "
            "have fewer with -j, and see ulimit -a"
        ) from error


def _first_cause(error: BaseException) -> BaseException:
    while cause := error.__cause__ or error.__context__:
        error = cause
    return error


def _silence_logs() -> None:
    """Silence Dask's loggers: their errors are also raised as exceptions."""
    for name in ("distributed", "distributed.client", "distributed.core"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


@contextlib.contextmanager
def _no_modules_here() -> Iterator[None]:
    """Keep started Python programs from importing from the current directory.

    Dask starts workers by ``python -c``, which imports from there first, and anyone may
    be able to write to a folder of dumps. Python 3.11 and later heed the variable.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


@contextlib.contextmanager
def remote(address: str) -> Iterator[Client]:
    """Yield a client of the scheduler at *address*.

    The scheduler may have no workers yet: a batch system may start them later.

    :raises FleetError: if no scheduler answers
    """
    _silence_logs()
    with dask.config.set({"distributed.comm.timeouts.connect": CONNECT}):
        try:
            client = Client(address, timeout=CONNECT)
        except (OSError, ValueError, TimeoutError) as error:
            raise FleetError(
                f"--scheduler {address}: {error}; start dask scheduler there"
            ) from error
        with client:
            yield client


def replace_lost(client: Client) -> None:
    """Replace workers whose nannies gave up; to be called periodically.

    A nanny starts its worker again if it ends while it runs, but not if it ends while
    it starts (Nanny._on_worker_exit of distributed 2026.8). An existing cluster is left
    alone: its owner decides how many workers it has.
    """
    cluster = client.cluster
    if cluster is not None:
        cluster.scale(len(cluster.worker_spec))


def dashboard_of(client: Client) -> str | None:
    """Return the address of Dask's dashboard; ``None`` if it does not run."""
    return client.dashboard_link if find_spec("bokeh") else None


def workers_of(client: Client) -> int:
    """Return the number of dumps that a cluster reads at once."""
    return sum(client.nthreads().values())


# --- A run over many dumps: starts workers, collects and stores the results.


Report = Callable[[str], Outcome]
"""Returns the result for the dump at a path; workers import it by its name."""

MAX_TRIES = 5
"""Maximum attempts at a dump whose workers are lost, or that changes meanwhile."""

CHANGES = "it changes while it is read; run this again when it is whole"

_AHEAD = 4
"""Dumps submitted to the cluster per worker, so that no worker idles."""

_LEAST_AHEAD = 64
_FETCH_S, _FETCH_ONE_S = 10.0, 1.0
_FLUSH_S = 5.0
_MAX_LINE = 1000
_FLUSH_ROWS = 1000


class Progress(Struct):
    """Progress of a run."""

    total: int
    """Number of dumps that the arguments name."""

    skipped: int = 0
    """Number of dumps that were done before, or are copies."""

    states: Counter[str] = field(default_factory=Counter)
    """Number of dumps whose results have come, by state."""

    workers: int | None = None
    """Number of dumps read at once; ``None`` until it is known."""

    start_s: float = field(default_factory=time.monotonic)

    @property
    def finished(self) -> int:
        """Dumps of this run that are done, whatever the result."""
        return self.states.total()

    @property
    def failed(self) -> int:
        """Dumps of this run that have no report."""
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
    """Why the cluster returned no outcome for a dump."""

    why: str
    ended_workers: bool = False
    """Whether the dump may have ended its workers."""


class Run:
    """A run on a cluster.

    :param done: Digests of the identities of dumps to skip.
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
        """Have each dump read and its result stored; return the final progress.

        Results that have come are stored even if an exception ends the run.
        """
        progress = Progress(len(paths))
        waiting = self._to_do(paths, progress)
        try:
            more = True
            while more or self._running or self._suspects:
                progress.workers = workers_of(self._client)
                more = more and self._submit(waiting, progress.workers)
                if self._suspects and not self._running:
                    # A suspect runs alone: if its worker ends, no other dump is lost.
                    self._start(self._suspects.popleft())
                self._saw(progress)
                self._collect(progress)
        finally:
            self._save()
            # Leave no tasks behind in a cluster that outlives the run.
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
        """Submit dumps until the cluster has enough; return whether any are left."""
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
        """Take finished outcomes; wait until there is one, or it is time to save."""
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
        """Return the rows of a dump; ``None`` if it is read again, or now is a copy."""
        now = identify(identity.path)
        has_changed = now.is_known and now.digest != identity.digest
        if has_changed:
            # The report may be of the old or of the new content.
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
            # If the file is gone, it may still be read at another path.
            identity = now
        return result_of(identity, outcome)

    def _outcomes(
        self, batch: list[Future[Outcome]]
    ) -> Iterator[tuple[Future[Outcome], Outcome | Lost]]:
        """Yield each future with its outcome, or with the reason why it has none."""
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
        """Return the outcomes of *futures*, without those lost with their workers."""
        # gather() waits for a lost outcome to be computed again, and there may be no
        # worker until replace_lost() runs: hence the timeout.
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
        """Return why a dump has no outcome: lost workers, or an error of its task."""
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
