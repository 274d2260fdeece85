# SPDX-License-Identifier: LGPL-2.1-or-later
import json
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from fixtures.lab.errors import LabError
from fixtures.lab.qmp import Qmp

Connect = Callable[..., Qmp]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """A client of a QEMU that greets and then gives the replies it is told to."""
    threads: list[threading.Thread] = []

    def start(*replies: dict[str, object]) -> Qmp:
        ours, theirs = socket.socketpair()

        def serve() -> None:
            with theirs, theirs.makefile("rwb") as stream:
                stream.write(b'{"QMP": {}}\r\n')
                stream.flush()
                for reply in ({"return": {}}, *replies):
                    stream.readline()
                    event = b'{"event": "STOP"}\n'
                    stream.write(event + json.dumps(reply).encode() + b"\n")
                    stream.flush()

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return Qmp(ours)

    yield start
    for thread in threads:
        thread.join()


def test_reply_comes_back_past_events(connect: Connect) -> None:
    qmp = connect({"return": {"running": False}})
    assert qmp.execute("query-status") == {"running": False}
    qmp.close()


def test_refusal_is_an_error(connect: Connect) -> None:
    qmp = connect({"error": {"class": "GenericError", "desc": "no such thing"}})
    with pytest.raises(LabError, match="refused nonsense: no such thing"):
        qmp.execute("nonsense")
    qmp.close()


def test_end_of_qemu_is_an_error(connect: Connect) -> None:
    qmp = connect()
    with pytest.raises(LabError):
        qmp.execute("query-status")
    qmp.close()
