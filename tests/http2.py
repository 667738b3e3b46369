"""HTTP/2 frames for calls that gRPC's clients cannot make: callers that read nothing, or send byte by byte."""

from __future__ import annotations

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, ACK, END_HEADERS = 1, 1, 4
# Settings of a caller to which nothing can be sent: the initial flow-control window (4) is 0 bytes.
NO_WINDOW = struct.pack(">HI", 4, 0)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big") + payload


def headers(path: str) -> bytes:
    """Of a call of gRPC: plain literals of HPACK."""
    told = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost"}
    told |= {"content-type": "application/grpc", "te": "trailers"}
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in told.items()
    )
