"""What the last slices of pictures looked like, so that a later request compares with them and need not decode them.

    request 1   slices A B      the means of B are kept
    request 2   slices B C      C is compared with B, and decoded alone

They are found by content: the files of a slice, how these are resized, and the salt of the prompt's caches.
"""

from __future__ import annotations

from framesieve.common.contract.plan import Int32Array, salted, tagged_digest
from framesieve.services.preprocessing.sources.last_used import LastUsed
from framesieve.services.preprocessing.video.pictures import PictureIndex
from framesieve.services.preprocessing.video.slices import PlannedMedia, PlannedVideo

_DOMAIN = b"framesieve seen slice v1"
_MAX_BYTES = 2**24


class SeenSlices:
    """Block means of slices, int32 as `change.block_means` returns them; thread-safe. Videos in files have none.

    Its methods read pictures: call them in a thread.
    """

    def __init__(self) -> None:
        self._means = LastUsed[bytes, Int32Array](_MAX_BYTES, lambda means: means.nbytes)

    def get(self, media: PlannedMedia, number: int, cache_salt: str) -> Int32Array | None:
        """The means of slice `number`, if a request has shown it."""
        key = _key(media, number, cache_salt)
        return self._means.get(key) if key else None

    def put(self, media: PlannedMedia, means: Int32Array, cache_salt: str) -> None:
        """Keeps those of the last slice."""
        if key := _key(media, -1, cache_salt):
            self._means.put(key, means)


def _key(media: PlannedMedia, number: int, cache_salt: str) -> bytes:
    """32 bytes that name the pixels of a slice; none for a video in a file."""
    if not (isinstance(media, PlannedVideo) and isinstance(media.index, PictureIndex)):
        return b""
    begins, ends = (0, *media.index.ends), media.index.ends
    slices, files = range(0, len(media.places), media.slice_frames), []
    for place in media.places[slices[number] :][: media.slice_frames]:
        with media.source.part(media.source.name, begins[place], ends[place]).open() as file:
            files.append(file.read())
    sent = repr((media.size_px, media.views, media.dtype)).encode()
    return salted(tagged_digest(_DOMAIN, (sent, *files)), cache_salt)
