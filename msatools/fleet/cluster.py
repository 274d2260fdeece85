# SPDX-License-Identifier: LGPL-2.1-or-later

"""The Dask cluster that reads the dumps: one of this machine, or one that is there."""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

import dask
from dask.system import cpu_count
from distributed import Client, LocalCluster

from msatools.fleet.errors import FleetError
from msatools.fleet.single import Bounds

MEMORY_BYTES = 4 << 30
"""Most private memory to read one dump, as of ``--sandbox``."""

SECONDS = 600
"""Most time to read one dump."""

CONNECT = "30s"
"""How long to wait for a scheduler, and between it and workers."""

_SETTINGS = {
    # A task that loses its worker is put back; the run counts, too.
    "distributed.scheduler.allowed-failures": 20,
    # A worker has no more tasks than it works on: of its end no others are suspected.
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
    from distributed.system import MEMORY_LIMIT

    # An eighth stays for this process, the scheduler and all else.
    return int(MEMORY_LIMIT * 7 // 8 // max(workers, 1))


@contextlib.contextmanager
def local(
    workers: int, bounds: Bounds, settings: Mapping[str, object] | None = None
) -> Iterator[Client]:
    """Yield a client of a cluster on this machine, whose workers nannies watch.

    All of it talks over TLS with a key of its own: who can send a worker work can do
    what the worker can.

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
    # Whatever a nanny meets, too.
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
    """Leave errors to us; they become exceptions as well."""
    for name in ("distributed", "distributed.client", "distributed.core"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


@contextlib.contextmanager
def _no_modules_here() -> Iterator[None]:
    """Have programs that are started find no modules in the current directory.

    Dask starts workers by ``python -c``, which looks there first, and it may be one of
    dumps that anyone can write to. Python heeds the variable since 3.11.
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

    It may have no workers yet, which a batch system starts when there is room.

    :raises FleetError: if there is none
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
    """Have workers replaced whose nannies gave up; call it now and then.

    A nanny starts its worker again if it ends while it runs, but not if it ends while
    it starts (Nanny._on_worker_exit of distributed 2026.8). Of somebody's cluster it is
    not for us to say how many workers it has.
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
