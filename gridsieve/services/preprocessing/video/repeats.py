"""Names the slices of a video by what the vision tower will see of them, and finds those that repeat an earlier one.

    slices      A  B  B  A  C
    digests     a  b        c         of those that are sent
    repeats           1  0            slices

The digest is made here, of sealed memory: workers read untrusted files, so their word would not do. Equal digests stand
for equal pixels, so nothing but digests is kept of earlier slices.
"""

from __future__ import annotations

import struct
from dataclasses import replace

from gridsieve.common.contract.plan import MediaPlan, salted, tagged_digest
from gridsieve.services.preprocessing.video.slices import Slice

_DOMAIN = b"gridsieve slice v1"


class Repeats:
    """The slices of one video so far. They come in order. cache_salt: of the digests, by which others find slices."""

    def __init__(self, plan: MediaPlan, cache_salt: str) -> None:
        self._cache_salt = cache_salt
        # A tower that takes groups of frames takes their times, too, so that each of its slices is another.
        self._timed = bool(plan.frames.group_frames)
        self._first_frames: dict[bytes, int] = {}

    def of(self, made: Slice) -> Slice:
        """The next slice with its digest, 32 bytes. If it has the frames and the kept tokens of an earlier one: with
        that one's first frame as `repeats`, and without memory to hand over. One without kept tokens stays as it is.

        It reads all pixels, outside of the interpreter lock: call it in a thread.
        """
        if not made.pixels.size:
            return made
        kept = b"" if made.kept is None else made.kept.tobytes()
        shape = struct.pack("<4q", *made.pixels.shape)
        digest = salted(tagged_digest(_DOMAIN, (shape, kept, made.pixels.data.cast("B"))), self._cache_salt)
        first_frame = self._first_frames.setdefault(digest, made.first_frame)
        if self._timed or first_frame == made.first_frame:
            return replace(made, digest=digest)
        return replace(made, digest=digest, repeats=first_frame, memory=None)
