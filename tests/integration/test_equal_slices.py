"""Equal slices of videos are encoded once, by a real encoder: embeddings are those of each slice by itself.

The encoder of the fleet runs one slice a forward.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gridsieve.client.encoding import Encoded, encode
from gridsieve.client.prompt import Pruning, Video
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.encoder.tower.patches import KeptFrames
from gridsieve.services.encoder.tower.tower import Tower
from tests.awake import SOON_S
from tests.encoder.kept import FLOAT32_ERROR, check_kept, exact_count, exact_scores
from tests.integration.fleet import Fleet, at_rest
from tests.preprocessing.preprocessing_media import decoded_in_order

SIDE_PX = 112
SLICE_TOKENS = 16


@pytest.fixture
def tower(fleet: Fleet) -> Tower:
    torch.set_num_threads(1)
    return load_tower(Checkpoint(fleet.encoder[0].model), "auto", torch.device("cpu"))


def pictures(*contents: int) -> list[NDArray[np.uint8]]:
    """Noise, equal for equal contents."""
    shape = (SIDE_PX, SIDE_PX, 3)
    return [np.random.default_rng(content).integers(0, 256, shape, dtype=np.uint8) for content in contents]


def lossless(shown: Sequence[NDArray[np.uint8]]) -> bytes:
    """An mp4 of 2 frames a second, so that all are sampled."""
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        with av.open(file.name, "w", format="mp4") as container:
            stream = container.add_stream("libx264", rate=2, options={"qp": "0"})
            stream.width, stream.height, stream.pix_fmt = SIDE_PX, SIDE_PX, "yuv444p"
            for each in shown:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(each, format="rgb24")))
            container.mux(stream.encode())
        return Path(file.name).read_bytes()


def each_by_itself(tower: Tower, shown: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
    """(1, tokens, D), of slices of two frames that the tower encodes one by one."""
    pairs = torch.from_numpy(np.stack(shown)).split(2)
    return torch.cat([tower.encode([pair])[0] for pair in pairs], dim=1).numpy()


def assert_close(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """Up to rounding. Embeddings of frames with other noise differ by far more."""
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=0)


class Counting:
    """Encodes videos, and says how many slices the tower ran, and how many were copied within and from others."""

    def __init__(self, fleet: Fleet) -> None:
        self._services = fleet.first[:2]
        self._encoder = fleet.encoder[0]

    async def encode(self, video: Video, pruning: Pruning | None = None) -> tuple[Encoded, tuple[int, int, int]]:
        before = self._counts()
        (made,) = await encode(self._encoder.address, video, pruning or Pruning())
        await at_rest(self._services, within_s=SOON_S)
        ran, repeated, cached = (int(now - then) for now, then in zip(self._counts(), before, strict=True))
        return made, (ran, repeated, cached)

    def _counts(self) -> list[float]:
        reused = "gridsieve_encoder_reused_slices_total"
        return [
            self._encoder.metric("gridsieve_encoder_batch_slices_sum"),
            self._encoder.metric(reused, source="repeated"),
            self._encoder.metric(reused, source="cached"),
        ]


@pytest.fixture
def counting(fleet: Fleet) -> Counting:
    return Counting(fleet)


async def test_what_stays_the_same_is_encoded_once(counting: Counting, tower: Tower) -> None:
    """A clip of one thing, then a still, then the first thing again. EVS scores the embeddings as ever."""
    clip = lossless(pictures(1, 2, *[3] * 12, 1, 2, 3, 4))
    whole, counts = await counting.encode(Video(data=clip))
    embeds = each_by_itself(tower, decoded_in_order(clip))
    assert_close(whole.values, embeds)
    slices = np.split(whole.values, 9, axis=1)
    assert np.array_equal(slices[7], slices[0])
    assert all(np.array_equal(each, slices[1]) for each in slices[2:7])
    assert counts == (3, 6, 0)
    pruned, counts = await counting.encode(Video(data=clip), Pruning(0.75, "evs"))
    scores = exact_scores(embeds[0], whole.plan.grid)
    check_kept(pruned.kept, scores, exact_count(whole.plan.grid, 0.75, SLICE_TOKENS), FLOAT32_ERROR)
    assert np.array_equal(pruned.values, whole.values[:, pruned.kept])
    assert counts == (0, 0, 0)


async def test_chosen_tokens_that_stay_the_same_are_encoded_once(counting: Counting, tower: Tower) -> None:
    clip, side = lossless(pictures(301, 302, *[303] * 12, 304, 305)), SIDE_PX // 4
    made, counts = await counting.encode(Video(data=clip), Pruning(rate=0.5, method="pixel_change"))
    chosen = []
    for index, pair in enumerate(np.stack(decoded_in_order(clip)).reshape(-1, 2, 4, side, 4, side, 3)):
        kept = made.kept[made.kept // SLICE_TOKENS == index] % SLICE_TOKENS
        squares = pair.transpose(0, 1, 3, 2, 4, 5).reshape(2, SLICE_TOKENS, side, side, 3)[:, kept]
        chosen.append(KeptFrames(torch.from_numpy(squares.reshape(2, -1, side, 3)), (4, 4), tuple(kept.tolist())))
    embeds = torch.cat([tower.encode([each])[0] for each in chosen if each.kept], dim=1)
    assert_close(made.values, embeds.numpy())
    differing = len({(each.kept, each.frames.numpy().tobytes()) for each in chosen if each.kept})
    assert counts == (differing, sum(bool(each.kept) for each in chosen) - differing, 0)
    assert counts[1]


async def test_windows_of_one_film_share_their_slices(counting: Counting, tower: Tower) -> None:
    clip = lossless(pictures(*range(100, 124)))
    shown, windows = decoded_in_order(clip), []
    for start_s, expected in ((0, (8, 0, 0)), (2, (2, 0, 6))):
        made, counts = await counting.encode(Video(data=clip, start_s=start_s, end_s=start_s + 8))
        assert_close(made.values, each_by_itself(tower, shown[2 * start_s :][:16]))
        assert counts == expected
        windows.append(made.values)
    assert np.array_equal(windows[1][:, : 6 * SLICE_TOKENS], windows[0][:, 2 * SLICE_TOKENS :])
