"""Limits of a request's size, which services and clients share."""

from __future__ import annotations

MAX_INLINE_BYTES = 64 * 2**20
"""The default of --max-inline-bytes: files and embeddings that a request may carry."""
GREATEST_INLINE_BYTES = 2**30
"""The greatest value of --max-inline-bytes."""
REQUEST_OVERHEAD_BYTES = 4 * 2**20
"""A request message beyond its inline media: 4 MiB of text and their encoding."""
LARGER_FILES = (
    "give larger files as an https URL or a file: path below --media-root, or upload them to the gateway's /v1/files"
)
"""The remedy for files that are too large to send. Clients replace it by the words of their own interface."""
MAX_PICTURE_BYTES = 16 * 2**20
"""The picture file of a live session's frame. The prompt of a slice has four of them, which MAX_INLINE_BYTES holds."""
MAX_RAW_PIXELS = (MAX_PICTURE_BYTES - 64) // 3
"""Of a frame in RGB, which with a header of at most 64 bytes is a picture file."""
