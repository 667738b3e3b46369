"""What a worker says of a sound is checked: a malicious file may have taken it over."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from gridsieve.common.contract.errors import PeerContract
from gridsieve.services.preprocessing.sound.features import LogMel
from gridsieve.services.preprocessing.sound.planned import PlannedSound
from gridsieve.services.preprocessing.sound.track import SoundIndex
from gridsieve.services.preprocessing.sources.source import bytes_source
from gridsieve.services.preprocessing.workers.indexes import sound_index_facts
from gridsieve.services.preprocessing.workers.jobs import IndexSound, SoundFeatures
from gridsieve.services.preprocessing.workers.protocol import Facts

INDEX = SoundIndex(Fraction(-1, 3), Fraction(7, 2))
MADE: Mapping[str, Any] = {
    "repaired_frames": 0,
    "decode_s": 0.0,
    "resize_s": 0.0,
    "decoded_ns": 1,
    "resized_ns": 2,
}
NOTHING = np.empty(0, np.uint8)


def test_an_index_is_what_the_worker_read() -> None:
    job = IndexSound(bytes_source("clip", b"a"))
    assert job.piece(0, Facts(sound_index_facts(INDEX)), NOTHING, None) == (INDEX,)
    assert job.piece(0, Facts(sound_index_facts(None)), NOTHING, None) == ()


@pytest.mark.parametrize(
    "forged",
    [
        {"start_s": [1, 0]},
        {"start_s": [2**64, 1]},
        {"start_s": [1]},
        {"duration_s": [-1, 2]},
        {"duration_s": [2**40, 1]},
    ],
    ids=str,
)
def test_an_impossible_index_breaks_the_contract(forged: dict[str, Any]) -> None:
    with pytest.raises(PeerContract):
        IndexSound(bytes_source("clip", b"a")).piece(0, Facts(sound_index_facts(INDEX) | forged), NOTHING, None)


def test_impossible_features_break_the_contract() -> None:
    log_mel = LogMel(rate=16_000, mels=4, window=400, hop=160, max_samples=None, padded=False)
    job = SoundFeatures(PlannedSound(bytes_source("clip", b"a"), INDEX, Fraction(0), 1600, log_mel))
    good = np.zeros((4, 10), np.float32)
    assert job.piece_bytes == good.nbytes
    assert job.piece(0, Facts(MADE), good.view(np.uint8).reshape(-1), None).pixels.shape == (1, 4, 10, 1)
    not_finite = good.copy()
    not_finite[3, 3] = np.nan
    for bad in (not_finite, good[:3]):
        with pytest.raises(PeerContract):
            job.piece(0, Facts(MADE), np.ascontiguousarray(bad).view(np.uint8).reshape(-1), None)
