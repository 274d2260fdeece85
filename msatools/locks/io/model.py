# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rows of ``msa-locks --io``: disks with their I/O in flight."""

from typing import Literal

from msgspec import Struct

from msatools.target.model import Address

Stage = Literal[
    "plugged",
    "queued",
    "scheduler",
    "dispatch",
    "requeued",
    "driver",
    "completed",
    "deferred",
    "delayed",
]
"""Where a request is. ``plugged``: in the plug of a task that is not done submitting;
``queued``: in a software queue of the block layer, or on its way there; ``scheduler``:
in the I/O scheduler; ``dispatch``: on the list of a hardware queue, as the driver did
not take it; ``requeued``: given back by the driver; ``driver``: with the driver and the
hardware; ``completed``: done by the hardware, but not yet reported. Of a device-mapper
disk: ``deferred``: held back while it is suspended; ``delayed``: held by dm-delay."""


class InFlight(Struct, frozen=True, kw_only=True):
    """A request, or a bio that a stacked disk holds."""

    address: Address
    """Address of the ``struct request`` or ``struct bio``."""

    operation: str
    """``read``, ``write``, ``flush``, ``discard``, … as the kernel's ``enum req_op``
    names it."""

    sector: int | None
    """First sector, in units of 512 bytes; ``None`` if it has no data."""

    bytes: int
    stage: Stage
    """Where it is: ``plugged``, ``queued``, ``scheduler``, ``dispatch``, ``requeued``,
    ``driver``, ``completed``, ``deferred`` or ``delayed``."""

    age_ns: int | None
    """Time since it was allocated; ``None`` if the kernel does not record that."""

    driver_age_ns: int | None
    """Time since the driver got it; ``None`` if it has not, or that is not recorded."""

    tag: int | None
    """Tag of the driver; ``None`` if it has none."""

    pid: int | None
    """ID of the thread in whose plug it is; ``None`` in other stages."""


class DiskIo(Struct, frozen=True, kw_only=True):
    """A disk and its I/O in flight."""

    name: str
    """Name, as in /sys/block."""

    device: str
    """Numbers, as ``254:0``."""

    reads: int | None
    """Number of reads in flight, as in /sys/block/NAME/inflight: for a disk with
    requests, those that its driver has; for another, such as one of the device mapper,
    all that it has accepted. ``None`` if unknown."""

    writes: int | None
    """Number of other operations in flight, as in /sys/block/NAME/inflight."""

    scheduler: str | None
    """Name of the I/O scheduler; ``None`` if it has none, or that is unknown."""

    depth: int | None
    """Number of requests that the driver takes at a time; ``None`` for a disk without
    requests."""

    is_suspended: bool
    """Whether it is a suspended disk of the device mapper."""

    is_frozen: bool
    """Whether its queue is frozen (``mq_freeze_depth``): new I/O has to wait."""

    is_quiesced: bool
    """Whether its queue is stopped (``quiesce_depth``): nothing goes to the driver."""

    no_completion_ns: int | None
    """Its last completion is at least so long ago; ``None`` if unknown. The kernel
    records no time of completions, but stamps a disk when it begins or completes I/O,
    or when its statistics are read (``bd_stamp``)."""

    below: tuple[str, ...]
    """Names of the disks below a stacked disk; empty for hardware."""

    requests: tuple[InFlight, ...]
    """Its requests, or the bios that it holds: the oldest first."""
