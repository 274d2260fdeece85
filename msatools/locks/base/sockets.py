# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads sockets: type, local address and peer.

include/net/sock.h, inet_sock.h and af_unix.h.
"""

import socket
import struct
from typing import Any

import numpy as np
from msgspec import Struct

from msatools.errors import LOST
from msatools.kernel.reader import Addresses
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, WordArray, read_structs
from msatools.locks.base.struct_reader import Layout
from msatools.target.addresses import KERNEL_HALF

_SOCKET = {"sock": ("sk",), "type": ("type",)}
_COMMON = "__sk_common."
_SOCK: Members = {
    "family": (f"{_COMMON}skc_family",),
    "protocol": ("sk_protocol",),
    "peer": (f"{_COMMON}skc_daddr",),
    "local": (f"{_COMMON}skc_rcv_saddr",),
    "peer_port": (f"{_COMMON}skc_dport",),
    "port": (f"{_COMMON}skc_num",),
    "peer6": WordArray((f"{_COMMON}skc_v6_daddr",)),
    "local6": WordArray((f"{_COMMON}skc_v6_rcv_saddr",)),
}
_UNIX, _INET, _INET6 = 1, 2, 10
_FAMILIES = {16: "netlink", 17: "packet", 40: "vsock", 31: "bluetooth", 38: "alg"}
_PROTOCOLS = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp", 132: "sctp", 262: "mptcp"}
_TYPES = {1: "stream", 2: "dgram", 3: "raw", 5: "seqpacket"}
_MAX_PATH = 108


class Endpoints(Struct, frozen=True):
    """The type, the local address and the peer of a socket."""

    type: str
    local: str | None
    peer: str | None


class Sockets:
    """Reads sockets."""

    def __init__(self, layout: Layout, losses: LossLog) -> None:
        self._layout = layout
        self._losses = losses

    def read(self, sockets: Addresses) -> list[Endpoints | None]:
        """Read many ``struct socket``; ``None`` for those that cannot be read."""
        reader, losses = self._layout.reader, self._losses
        outer = read_structs(reader, "struct socket", _SOCKET, sockets, losses)
        socks = outer["sock"].astype(np.uint64)
        inner = read_structs(reader, "struct sock", _SOCK, socks, losses)
        found: list[Endpoints | None] = []
        for row, address in enumerate(socks.tolist()):
            if not (outer.readable[row] and inner.readable[row]):
                found.append(None)
                continue
            values = {name: inner[name][row] for name in inner.columns}
            found.append(self._endpoints(address, int(outer["type"][row]), values))
        return found

    def _endpoints(self, sock: int, kind: int, values: dict[str, Any]) -> Endpoints:
        family = int(values["family"])
        form = _TYPES.get(kind, str(kind))
        if family == _UNIX:
            return self._unix(sock, form)
        if family not in (_INET, _INET6):
            return Endpoints(_FAMILIES.get(family, f"family {family}"), None, None)
        protocol = int(values["protocol"])
        # The protocol of a raw socket is not one of its own kind.
        name = _PROTOCOLS.get(protocol, form) if form != "raw" else form
        local, peer = values["local"], values["peer"]
        ends = [_ipv4(local), _ipv4(peer)]
        if family == _INET6:
            name += "6"
            ends = [_ipv6(values.get("local6")), _ipv6(values.get("peer6"))]
        ports = int(values["port"]), socket.ntohs(int(values["peer_port"]))
        texts = [
            f"{end}:{port}" if end is not None and port else None
            for end, port in zip(ends, ports, strict=True)
        ]
        return Endpoints(name, texts[0], texts[1])

    def _unix(self, sock: int, form: str) -> Endpoints:
        local = self._unix_name(sock)
        peer = None
        try:
            other = self._layout.member(sock, "unix_sock", "peer")
            peer = self._unix_name(other) if other >= KERNEL_HALF else None
        except LOST:
            pass
        return Endpoints(f"unix {form}", local, peer)

    def _unix_name(self, sock: int) -> str | None:
        """Read the name that a socket is bound to; an abstract one begins with @."""
        try:
            address = self._layout.member(sock, "unix_sock", "addr")
            if address < KERNEL_HALF:
                return None
            length = self._layout.member(address, "unix_address", "len")
            start = address + self._layout.offset("unix_address", "name")
            size = min(max(length - 2, 0), _MAX_PATH)
            # The path follows sun_family in struct sockaddr_un.
            data = self._layout.reader.read(start + 2, size)
        except LOST:
            return None
        name, _, abstract = data.partition(b"\0")
        data = name if name or not abstract else b"@" + abstract
        return data.decode("utf-8", "backslashreplace") or None


def _ipv4(value: Any) -> str | None:
    return socket.inet_ntoa(struct.pack("<I", int(value)))


def _ipv6(value: Any) -> str | None:
    if not isinstance(value, np.ndarray):
        return None
    return f"[{socket.inet_ntop(socket.AF_INET6, value.tobytes())}]"
