# SPDX-License-Identifier: LGPL-2.1-or-later

"""A plan to set CPUs apart: commands to copy, between comments of a shell."""

from collections.abc import Iterator

from msatools.cpus.model import CpuPlan, PlanRest
from msatools.kernel.ranges import ranges
from msatools.render.blocks import Block, Span, text, verbatim

_SHOWN = 8


def plan_lines(plan: CpuPlan) -> Iterator[Block]:
    """Yield the lines of a plan, of which all but the commands begin with ``#``."""
    apart, others = ranges(plan.cpus), ranges(plan.others)
    head = f"# To set CPU {apart} apart, and leave {others} for all else; not run here"
    yield text(Span(head, "title"))
    for step in plan.steps:
        yield text()
        yield text(f"# {step.name}: {step.text}")
        for command in step.commands:
            yield verbatim(f"# {command}" if step.name == "boot" else command)
    yield text()
    yield text(Span(f"# What stays on {apart} all the same:", "title"))
    for rest in plan.stays:
        yield text(f"# - {rest.text}{_numbers(rest)}")


def _numbers(rest: PlanRest) -> str:
    """Return which interrupts or tasks stay."""
    if rest.irqs:
        return f" (irq {ranges(rest.irqs, _SHOWN)})"
    if rest.pids:
        return f" (pid {ranges(rest.pids, _SHOWN)})"
    return ""
