# SPDX-License-Identifier: LGPL-2.1-or-later

"""Names of signals and exit statuses. Pure."""

_SIGNALS = (
    *("HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1"),
    *("SEGV", "USR2", "PIPE", "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP"),
    *("TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH"),
    *("IO", "PWR", "SYS"),
)
"""Signals from 1 on, as on x86 and arm64 (include/uapi/asm-generic/signal.h)."""

_CORE = 0x80
_SIGNAL = 0x7F


def signal_name(number: int) -> str:
    """
    Return the name of a signal; real-time signals have numbers only.

    >>> signal_name(17), signal_name(34)
    ('SIGCHLD', 'signal 34')
    """
    if 0 < number <= len(_SIGNALS):
        return f"SIG{_SIGNALS[number - 1]}"
    return f"signal {number}"


def ending(exit_code: int) -> str:
    """
    Return how a task ended, by its status as of wait().

    >>> ending(0), ending(3 << 8), ending(9), ending(11 | 0x80)
    ('0', '3', 'SIGKILL', 'SIGSEGV (core)')
    """
    number = exit_code & _SIGNAL
    if not number:
        return str(exit_code >> 8 & 0xFF)
    return signal_name(number) + (" (core)" if exit_code & _CORE else "")
