"""Files that are often sent and that the pinned libraries do not read: refused by name.

Source: ISO/IEC 23008-12, 10.2 (brands of HEIF); the WebP container specification (`VP8X`); RFC 8216, 4.3.1.1 (HLS);
ISO/IEC 23009-1, 5.3.1 (DASH); ISO/IEC 14496-12, 8.12 and ISO/IEC 23001-7, 4 (protected samples).
"""

from __future__ import annotations

import re
from typing import BinaryIO

from gridsieve.services.preprocessing.video.orientation import movie

_HEAD_BYTES = 256

_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis")
_ANIMATION = 1 << 1
# A comment ends at its first "-->", so that there is one way to read several.
_COMMENTS = rb"(?:<!--(?:(?!-->).)*-->\s*)*"
_PLAYLIST = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:(#EXTM3U)|(?:<\?xml[^>]*>\s*)?" + _COMMENTS + rb"<MPD[\s>])", re.DOTALL
)
_PROTECTED = re.compile(rb"schm\0\0\0.(cenc|cens|cbc1|cbcs|piff)", re.DOTALL)


def playlist(head: bytes) -> str | None:
    """The kind of a playlist, "HLS" or "DASH", by its first bytes; None for what is none."""
    found = _PLAYLIST.match(head)
    return ("HLS" if found[1] else "DASH") if found else None


def unread_format(file: BinaryIO) -> str | None:
    """What a file is, and what to send instead; None for any other file, which is then at its beginning again."""
    file.seek(0)
    head = file.read(_HEAD_BYTES)
    if head[4:8] == b"ftyp" and any(brand in head[8 : head[3]] for brand in _HEIC_BRANDS):
        return "HEIC, which is not read: convert it to JPEG, PNG, WebP or AVIF"
    if head[:4] == b"RIFF" and head[8:16] == b"WEBPVP8X" and head[20] & _ANIMATION:
        return "animated WebP, which is not read: convert it to GIF, AVIF, WebM or MP4"
    if playlist(head):
        return (
            "a playlist of HLS or DASH, which names other files: send one file, as ffmpeg -i PLAYLIST -c copy makes it"
        )
    boxes = movie(file)
    if b"encv" in boxes and _PROTECTED.search(boxes):
        return "an encrypted MP4 (Common Encryption), which is not read without its key: send it decrypted"
    file.seek(0)
    return None
