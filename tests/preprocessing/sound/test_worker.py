"""Sound comes out of a confined worker, of 256 MiB, as it comes out in this process."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from gridsieve.services.preprocessing.sound.track import decode_sound, read_sound
from gridsieve.services.preprocessing.sources.source import bytes_source
from gridsieve.services.preprocessing.workers.job_queue import JobQueue
from tests.preprocessing.sound.sounds import Track, noise, sound_file
from tests.preprocessing.worker_jobs import Ask

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    ("container", "codec"), [("mp4", "aac"), ("webm", "libopus"), ("mp3", "libmp3lame"), ("matroska", "flac")]
)
async def test_sound_comes_out_as_in_this_process(queue: JobQueue, container: str, codec: str) -> None:
    track = Track(noise(1, 48_000, 2), codec, 48_000, "stereo")
    source = bytes_source("clip", sound_file(container, track))
    index = read_sound(source)
    assert index
    _, data = await queue.call(Ask("hear", source=source))
    assert np.array_equal(data.view(np.float32), decode_sound(source, index, Fraction(0), Fraction(1), 16_000))
