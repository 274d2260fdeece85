# SPDX-License-Identifier: LGPL-2.1-or-later

"""The plan to set some CPUs apart: a part of the report of msa-cpus."""

from typing import Literal

from msgspec import Struct


class PlanStep(Struct, frozen=True, kw_only=True):
    """One part of a plan to set CPUs apart."""

    name: Literal["partition", "interrupts", "workqueues", "boot"]
    """The part that is set apart; ``boot`` is all of them, at the next boot."""

    text: str
    """What it does, in one line."""

    commands: tuple[str, ...]
    """Lines for a shell; of ``boot`` words for the kernel's command line."""


class PlanRest(Struct, frozen=True, kw_only=True):
    """What stays on the CPUs of a plan all the same."""

    name: Literal[
        "managed-interrupts",
        "fixed-interrupts",
        "bound-threads",
        "own-affinity",
        "cpusets",
        "unbound-work",
        "timers",
    ]
    """The kind."""

    text: str
    """What it is, in one line."""

    irqs: tuple[int, ...]
    """Numbers of the interrupts, if it is some."""

    pids: tuple[int, ...]
    """IDs of the tasks, if it is some."""


class CpuPlan(Struct, frozen=True, kw_only=True):
    """A plan to set CPUs apart, which is printed and never run."""

    cpus: tuple[int, ...]
    """The CPUs to set apart."""

    others: tuple[int, ...]
    """The online CPUs that are left for all else."""

    steps: tuple[PlanStep, ...]
    """What is to be done."""

    stays: tuple[PlanRest, ...]
    """What stays on them all the same."""
