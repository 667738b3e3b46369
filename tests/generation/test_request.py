"""What a request says of its answer, and which statuses it may take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common.contract.plan import MAX_POSITION
from services.generation.request.request import Status
from services.generation.request.rope import RopeState
from services.generation.sampling.sampler import SamplingParams
from tests.oracle import Text
from tests.tiny import make_plan, make_request


def test_an_answer_behind_the_last_position_is_known_by_positions_that_did_not_wrap() -> None:
    request = make_request("a", [Text((5, 6))], SamplingParams(4)).request
    plan = make_plan([Text((5, 6))])
    request.rope = RopeState(replace(plan, positions=plan.positions + np.int32(MAX_POSITION - 1)), [])
    request.output_ids += [1, 2, 3]
    positions = np.frombuffer(request.content(2, 5), np.int32)[-9:]
    assert positions.tolist() == 3 * [MAX_POSITION + 1, MAX_POSITION + 2, MAX_POSITION + 3]


def test_a_finished_request_changes_no_more() -> None:
    request = make_request("a", [Text((5,))], SamplingParams(1)).request
    request.move_to(Status.WAITING)
    request.move_to(Status.RUNNING)
    request.move_to(Status.DONE)
    with pytest.raises(AssertionError, match="cannot become waiting"):
        request.move_to(Status.WAITING)
