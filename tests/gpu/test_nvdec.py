"""A card makes the frames that the CPU makes. It needs PyAV: `python -m benchmarks.gpu.bundle --media`."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("av")

from gridsieve.common.contract.errors import StartupError
from tests.preprocessing.fake_card import CountingCard
from tests.preprocessing.test_card import AV1, ON_CARD, PLACES, assert_as_on_the_cpu, film


@pytest.mark.parametrize("made", [*ON_CARD.values(), AV1], ids=[*ON_CARD, "av1"])
def test_frames_of_a_card_are_those_of_the_cpu(made: dict[str, Any]) -> None:
    try:
        card = CountingCard()
    except StartupError as error:
        pytest.skip(str(error))
    assert_as_on_the_cpu(film(size=(288, 352), **made), card)  # NVDEC refuses smaller frames of some codecs
    assert (card.on_card, card.lost) == (len(set(PLACES)), False)
