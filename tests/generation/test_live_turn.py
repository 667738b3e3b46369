"""The turn of a live session: what its next slice builds on, also where the services that it calls fail."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

from gridsieve.common.contract.errors import MediaRejected
from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.services.generation.live.frames import US_PER_S, Frame, FramePair
from gridsieve.services.generation.live.session_writer import SessionWriter
from gridsieve.services.generation.live.turn import Turn
from gridsieve.services.generation.request.live_cuts import SliceSegment
from gridsieve.services.generation.request.session import Segment, Session
from tests.tiny import BLOCK_TOKENS

ROWS = np.arange(4, dtype=np.int32)
SEGMENT = Segment(ROWS, np.tile(ROWS, (3, 1)), 4)
WHOLE = SliceSegment(SEGMENT, Grid(1, 2, 2), ROWS, np.zeros(3, np.int32))
CHANGED = replace(WHOLE, reference=b"last shown")
SETTLED = replace(CHANGED, settled=True)


def shown(time_s: int, stream: int = 0) -> FramePair:
    frames = [Frame(b"picture", time_s * US_PER_S + each, time_s) for each in (0, US_PER_S // 2)]
    return FramePair(*frames, stream=stream)


def turn_of(*cuts: SliceSegment) -> tuple[Turn, Session]:
    """A turn of which the first slice is whole."""
    session = Session("live", 64, 16, 16)
    turn = Turn(session)
    for number, cut in enumerate(cuts):
        turn.append(shown(number), cut, number, whole=not number)
    return turn, session


def test_a_slice_builds_on_the_one_before_it_until_the_whole_one_or_its_stream_is_gone() -> None:
    turn, session = turn_of(WHOLE, CHANGED)
    base = turn.base_of(shown(2))
    assert (base.shown, base.reference, base.is_gone) == (shown(1), b"last shown", False)
    assert turn.base_of(shown(2, stream=1)).is_gone
    session.first = 2  # segment 1 was evicted; segment 0 stays for ever
    base = turn.base_of(shown(2))
    assert (base.shown, base.reference, base.is_gone) == (shown(1), b"", True)
    turn.begin()
    assert turn.base_of(shown(2)).shown is None


@pytest.mark.parametrize(("cut", "is_gone"), [(WHOLE, True), (CHANGED, False)])
def test_without_pictures_a_slice_needs_the_reference(cut: SliceSegment, is_gone: bool) -> None:
    turn, _ = turn_of(WHOLE, cut)
    turn.give_up_pictures()
    base = turn.base_of(shown(2))
    assert base.is_gone == is_gone
    assert base.shown
    # Of a whole slice its predecessor has the times, and pictures of the same size.
    assert base.shown.size_bytes == (2 * len(b"picture") if is_gone else 0)
    assert base.shown.time_us == shown(1).time_us


def test_only_files_that_settled_keep_nothing() -> None:
    for cut, nothing in ((CHANGED, False), (SETTLED, True)):
        turn, _ = turn_of(WHOLE, cut)
        again = shown(2)
        assert turn.base_of(again).keeps_nothing_of(again) == nothing
        other = again.showing(b"another", b"picture")
        assert not turn.base_of(other).keeps_nothing_of(other)


async def test_a_slice_whose_decoder_fails_is_refused_and_the_session_keeps_what_it_has_seen() -> None:
    """Unlike one of another size, after which the session begins again."""
    failed = MediaRejected("cannot be decoded: its decoder crashed", field="prompt.messages[0].parts[0].video.frames")
    media = Mock(open=Mock(side_effect=[failed, nullcontext()]))
    session, responses = Session("live", 64, 16, BLOCK_TOKENS), AsyncMock()
    wanted = Mock(pruning=ItemPruning(threshold=0.05, method="pixel_change"), max_pixels=None, window_s=math.inf)
    writer = SessionWriter(wanted, session, responses, Mock(), media, Mock(), Mock(), dict)
    writer._turn.append(shown(0), WHOLE, number=0, whole=True)
    with pytest.raises(MediaRejected, match="its decoder crashed"):
        await writer.write(shown(1))
    assert media.open.call_count == 1
    assert not responses.mock_calls
