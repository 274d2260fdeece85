# SPDX-License-Identifier: LGPL-2.1-or-later

"""Connect to a QEMU guest's QMP socket."""

import select
import socket

from msatools.target.errors import NotPermittedError, TargetError

_GREETING_TIMEOUT_S = 5.0


def connect(address: str) -> socket.socket:
    """Connect, and see that QMP answers.

    drgn would wait for ever on a socket that another client holds, so the greeting is
    awaited here, and left in the socket for drgn.

    :param address: a Unix socket's path, or ``host:port``
    :raises NotPermittedError: if this user may not connect
    :raises TargetError: if nothing listens there, or it is not a free QMP socket
    """
    try:
        connection = _connect(address)
    except PermissionError as error:
        raise NotPermittedError(
            address, "permission denied", "run as the user who runs the guest, or root"
        ) from error
    except OSError as error:
        raise TargetError(
            address,
            error.strerror or str(error),
            "name the socket of a running QEMU's -qmp option",
        ) from error

    if not select.select([connection], [], [], _GREETING_TIMEOUT_S)[0]:
        connection.close()
        raise TargetError(
            address,
            f"no answer in {_GREETING_TIMEOUT_S:.0f} s",
            "give QEMU a second -qmp socket if another program holds this one",
        )
    return connection


def _connect(address: str) -> socket.socket:
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and not host.startswith(("/", ".")):
        return socket.create_connection((host or "localhost", int(port)))
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection
