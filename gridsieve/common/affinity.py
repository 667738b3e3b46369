"""Affinity: questions about the same media go to the same replica, whose caches hold what it computed for them.

    prompt ─▶ key of its first media item ─▶ metadata MEDIA_KEY ─▶ gRPC's ring ─▶ a replica (`channels`, `by_media`)

It is a preference: any replica answers any question. The key is a digest, since a URL may hold a secret. It names the
file and not the frames that are used, so that all windows of a film have the same key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count
from typing import TypeAlias

from gridsieve.common.channels import MEDIA_KEY
from gridsieve.common.contract.wire import named_media
from gridsieve.v1 import prompt_pb2

Metadata: TypeAlias = tuple[tuple[str, str], ...]

# Of a large file only its size, its first and its last bytes are digested. Equal keys of different files do no harm.
_SAMPLE_BYTES = 2**16
_KEY_BYTES = 16

# So many calls about the same media run at a time before another replica gets them, too: it computes what the first
# one has cached, but all other replicas may be idle.
MAX_TOGETHER = 8


class Affinity:
    """All calls of this process to the replicas of one service. For one event loop."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()  # by value of MEDIA_KEY

    @contextmanager
    def of(self, key: str | None) -> Iterator[Metadata]:
        """Metadata of a call about this media, which runs inside. key: see `media_key`; without one it is empty."""
        if key is None:
            yield ()
            return
        value = next(each for each in (f"{key}-{group}" for group in count()) if self._running[each] < MAX_TOGETHER)
        self._running[value] += 1
        try:
            yield ((MEDIA_KEY, value),)
        finally:
            self._running[value] -= 1
            if not self._running[value]:
                del self._running[value]


def media_key(prompt: prompt_pb2.Prompt, files: Sequence[bytes | bytearray] = ()) -> str | None:
    """32 characters that name the first media item; None for a prompt without media.

    files: the media files that `detach_files` took out of the prompt.
    """
    for _, _, item in named_media(prompt):
        content = _content(item, files)
        digest = blake2b(len(content).to_bytes(8), digest_size=_KEY_BYTES)
        digest.update(content[:_SAMPLE_BYTES])
        digest.update(content[-_SAMPLE_BYTES:])
        return digest.hexdigest()
    return None


def _content(item: prompt_pb2.Media, files: Sequence[bytes | bytearray]) -> bytes | bytearray:
    """What an item is known by. Of frames the first picture, so that a list that grows keeps its key."""
    match item.WhichOneof("source"):
        case "data":
            return item.data
        case "data_bytes":
            return files[0]
        case "frames":
            sizes = item.frames.sizes_bytes
            return files[0][: sizes[0]] if sizes else b"".join(item.frames.pictures[:1])
        case "embeds":
            return item.embeds.tensor.data
    return (item.url or item.path).encode()
