"""What the pruned prompt refuses, and its edges. The law shows how it is gathered and packed: `test_law.py`."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from gridsieve.common.contract.plan import MAX_POSITION, Grid, Int32Array, Modality, PromptPlan, Run
from gridsieve.services.generation.request.pruned_prompt import PrunedPrompt
from gridsieve.services.generation.sampling.sampler import SamplingParams
from tests.generation.generation_peers import media_plan
from tests.oracle import Text
from tests.tiny import make_plan, make_request


@pytest.mark.parametrize("kept", [None, np.arange(0, 1024 * 400, 3, dtype=np.int32)], ids=["all", "a third"])
def test_a_part_of_an_item_costs_as_much_as_its_own_tokens(kept: Int32Array | None) -> None:
    slices, size = 1024, 400
    runs = tuple(Run(2 + (size + 3) * number, size) for number in range(slices))
    ids = np.zeros(runs[-1].end + 2, np.int32)
    item = replace(media_plan(Modality.VIDEO, 2, Grid(slices, 20, 20)), runs=runs)
    num_kept = slices * size if kept is None else kept.size
    state = PrunedPrompt(PromptPlan(ids, np.tile(ids, (3, 1)), (item,), 0, bytes(32)), [num_kept])
    began_s = time.process_time()
    for end in range(size, slices * size, size):
        state.deliver(0, None if kept is None else kept[: np.searchsorted(kept, end)], 9, end)
    state.deliver(0, kept, 9)
    # It takes 0.2 s, and many times as long as this where each part costs as much as the whole item.
    assert time.process_time() - began_s < 4
    assert state.complete
    assert len(state.spans) == slices


def test_positions_of_an_answer_behind_the_last_position_do_not_wrap() -> None:
    request = make_request("a", [Text((5, 6))], SamplingParams(4)).request
    plan = make_plan([Text((5, 6))])
    request.prompt = PrunedPrompt(replace(plan, positions=plan.positions + np.int32(MAX_POSITION - 1)), [])
    request.output_ids += [1, 2, 3]
    positions = np.frombuffer(request.content(2, 5), np.int32)[-9:]
    assert positions.tolist() == 3 * [MAX_POSITION + 1, MAX_POSITION + 2, MAX_POSITION + 3]


def test_ids_of_stored_vectors_are_no_text() -> None:
    plan = make_plan([Text((5, 300, 6))])
    state = PrunedPrompt(plan, [], vocab_size=300)
    assert state.ids.tolist() == [5, 300, 6]
    assert state.text_ids.tolist() == [5, -1, 6]
