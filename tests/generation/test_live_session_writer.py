"""What writes a live session, where the services that it calls fail."""

from __future__ import annotations

import math
from contextlib import nullcontext
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

from gridsieve.common.contract.errors import MediaRejected
from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.services.generation.live.frames import US_PER_S, Frame, FramePair
from gridsieve.services.generation.live.session_writer import SessionWriter
from gridsieve.services.generation.request.live_cuts import SliceSegment
from gridsieve.services.generation.request.session import Segment, Session
from tests.tiny import BLOCK_TOKENS


def shown(time_s: int) -> FramePair:
    return FramePair(*(Frame(b"picture", time_s * US_PER_S + each, time_s) for each in (0, US_PER_S // 2)))


async def test_a_slice_whose_decoder_fails_is_refused_and_the_session_keeps_what_it_has_seen() -> None:
    """Unlike one of another size, after which the session begins again."""
    failed = MediaRejected("cannot be decoded: its decoder crashed", field="prompt.messages[0].parts[0].video.frames")
    media = Mock(open=Mock(side_effect=[failed, nullcontext()]))
    session, responses = Session("live", 64, 16, BLOCK_TOKENS), AsyncMock()
    wanted = Mock(pruning=ItemPruning(threshold=0.05, method="pixel_change"), max_pixels=None, window_s=math.inf)
    writer = SessionWriter(wanted, session, responses, Mock(), media, Mock(), dict)
    rows = np.arange(4, dtype=np.int32)
    segment = Segment(rows, np.tile(rows, (3, 1)), 4)
    first = SliceSegment(segment, Grid(1, 2, 2), rows, np.zeros(3, np.int32))
    writer._turn.append(shown(0), first, number=0, whole=True)
    with pytest.raises(MediaRejected, match="its decoder crashed"):
        await writer.write(shown(1))
    assert media.open.call_count == 1
    assert not responses.mock_calls
