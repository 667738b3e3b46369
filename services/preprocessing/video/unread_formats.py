"""Formats that are often sent and that the pinned libraries do not read: refused by name.

Source: ISO/IEC 23008-12, 10.2 (brands of HEIF); the WebP container specification (`VP8X`).
"""

from __future__ import annotations

HEAD_BYTES = 64

_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis")
_ANIMATION = 1 << 1


def unread_format(head: bytes) -> str | None:
    """The format's name, and what to send instead, by the first HEAD_BYTES of a file; None for any other format."""
    if head[4:8] == b"ftyp" and any(brand in head[8 : head[3]] for brand in _HEIC_BRANDS):
        return "HEIC, which is not read: convert it to JPEG, PNG, WebP or AVIF"
    if head[:4] == b"RIFF" and head[8:16] == b"WEBPVP8X" and head[20] & _ANIMATION:
        return "animated WebP, which is not read: convert it to GIF, AVIF, WebM or MP4"
    return None
