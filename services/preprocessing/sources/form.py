"""How the bytes of a stream of encoded video come."""

from __future__ import annotations

from enum import StrEnum


class Form(StrEnum):
    """CONTAINER: a container that is read without seeking. RTP: a description (SDP), then packets of one track, each
    after its length in 2 bytes (RFC 4571)."""

    CONTAINER = "container"
    RTP = "rtp"
