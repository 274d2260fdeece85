# SPDX-License-Identifier: LGPL-2.1-or-later

"""Arguments about the target: what they name, and what has no effect on it."""

import argparse
from typing import TYPE_CHECKING

from msatools.cli.maybe_file import HERE, MaybeFile
from msatools.cli.usage import UsageError
from msatools.cli.words import Words, named_targets

if TYPE_CHECKING:
    from msatools.target import TargetSpec


_OF_MEMORY = (("kernel_number", "--kernel"), ("vmcoreinfo", "--vmcoreinfo"))
"""Arguments about a file with memory and no note, and their options."""


def target_path(args: argparse.Namespace, words: Words) -> str | None:
    """Return the file that is the only target; ``None`` if there is no such file."""
    path = words.target if words.target is not None else args.core
    return path if named_targets(args) == [path] else None


def target_spec(args: argparse.Namespace, words: Words) -> "TargetSpec":
    """Return the target that a shell's arguments name.

    :raises UsageError: if they name two, or one that contradicts other arguments
    """
    from msatools.target import TargetSpec

    named = named_targets(args)
    if len(named) > 1:
        raise UsageError(f"{named[1]}: a second target, after {named[0]}")
    if args.types == "btf" and (args.vmlinux is not None or args.debuginfod):
        other = "--debuginfod" if args.vmlinux is None else "-s"
        raise UsageError(f"{other}: asks for debug info, and --types btf for none")
    spec = TargetSpec(
        path=words.target if words.target is not None else args.core,
        qemu=args.qemu,
        vmlinux=args.vmlinux,
        types=args.types,
        debuginfod=args.debuginfod,
        kernel=args.kernel_number,
        vmcoreinfo=args.vmcoreinfo,
    )
    for name, option in _OF_MEMORY:
        if getattr(args, name) is not None and (spec.is_live or spec.qemu is not None):
            raise UsageError(f"{option}: it is for dumps, and no dump is named")
    if words.interval_s is not None and not spec.is_live:
        raise UsageError(f"{spec.path}: a dump does not change in an interval")
    check_users(args, is_own=spec.is_live and spec.qemu is None)
    return spec


def check_users(args: argparse.Namespace, *, is_own: bool) -> None:
    """Refuse names of users unless the target is the running kernel.

    :param is_own: Whether the target is the running kernel.
    :raises UsageError: if there are any
    """
    for user in getattr(args, "users", None) or ():
        if isinstance(user, str) and not is_own:
            raise UsageError(
                f"-u {user}: a dump has no user names; use the number (such as -u 0)"
            )


def refuse_in_sandbox(
    args: argparse.Namespace, parser: argparse.ArgumentParser, *, is_live: bool
) -> None:
    """Refuse what a sandbox takes away, with ``--sandbox``.

    :raises UsageError: if there is any
    """
    if not args.sandbox:
        return
    if is_live:
        raise UsageError("--sandbox: it is for dumps, and no dump is named")
    if args.debuginfod:
        raise UsageError("--debuginfod: there is no network with --sandbox")
    for action in parser._actions:
        if isinstance(action, MaybeFile) and getattr(args, action.dest) not in (
            None,
            HERE,
        ):
            raise UsageError(
                f"{action.option_strings[0]} FILE: no file is written with --sandbox; "
                "leave FILE out, and redirect the output"
            )


def refuse_target(args: argparse.Namespace, words: Words) -> None:
    """Refuse arguments that name a target when none is read.

    :raises UsageError: if there are any
    """
    named = named_targets(args) + getattr(args, "operands", [])
    if words.interval_s is not None:
        named.append(f"{words.interval_s:g}")
    if getattr(args, "vmlinux", None) is not None:
        named.append(args.vmlinux)
    if getattr(args, "types", "auto") != "auto":
        named.append("--types")
    named += [option for name, option in _OF_MEMORY if getattr(args, name, None)]
    for name in ("debuginfod", "sandbox"):
        if getattr(args, name, False):
            named.append(f"--{name}")
    if args.record is not None:
        named.append("--record")
    if named:
        raise UsageError(f"{named[0]}: --diff reads no target")


def refuse_kernel(args: argparse.Namespace, words: Words, path: str) -> None:
    """Refuse options that do not apply to a recording.

    :raises UsageError: if there are any
    """
    if words.interval_s is not None:
        raise UsageError(f"{path}: a recording has intervals of its own")
    for name, option in (
        ("vmlinux", "-s"),
        *_OF_MEMORY,
        ("debuginfod", "--debuginfod"),
        ("sandbox", "--sandbox"),
        ("record", "--record"),
        ("workers", "-j"),
        ("self_check", "--self-check"),
    ):
        if getattr(args, name, None):
            raise UsageError(f"{option}: {path} is a recording, not a kernel")
    if args.types != "auto":
        raise UsageError(f"--types: {path} is a recording, not a kernel")
