"""What the pruned prompt refuses, and its edges. The law shows how it is gathered and packed: `test_law.py`."""

from __future__ import annotations

import time
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from gridsieve.common.contract.errors import PeerContract
from gridsieve.common.contract.plan import MAX_POSITION, Grid, Int32Array, Modality, PromptPlan, Run
from gridsieve.services.generation.memory.block_table import BlockTable
from gridsieve.services.generation.request.batch import Chunk, decodes_first, pack
from gridsieve.services.generation.request.pruned_prompt import PrunedPrompt
from gridsieve.services.generation.request.request import Adapter
from gridsieve.services.generation.sampling.sampler import SamplingParams
from tests.generation.generation_peers import media_plan
from tests.oracle import Item, Text
from tests.tiny import BLOCK_TOKENS, make_plan, make_request


@pytest.mark.parametrize(
    ("index", "kept", "message"),
    [
        (0, [0, 1, 2], "must keep 4 tokens"),
        (0, [1, 0, 2, 3], "must keep 4 tokens"),
        (0, [0, 1, 2, 8], "must keep 4 tokens"),
        (1, [0, 1, 2, 3], "does not exist"),
    ],
)
def test_an_item_that_contradicts_the_plan_or_comes_twice_is_refused(index: int, kept: list[int], message: str) -> None:
    video = Item(2, 2, 2, Fraction(3, 2), np.zeros((8, 1), np.float32), rate=0.5)
    state = PrunedPrompt(make_plan([video]), [4])
    with pytest.raises(PeerContract, match=message):
        state.deliver(index, np.array(kept, np.int32), 9)
    state.deliver(0, np.array([0, 1, 2, 7], np.int32), 9)
    assert state.complete
    with pytest.raises(PeerContract, match="delivered twice"):
        state.deliver(0, np.array([0, 1, 2, 7], np.int32), 9)


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


def test_chunks_of_one_adapter_are_adjacent() -> None:
    """Within decodes and within other chunks; otherwise the order stays."""
    one, two = Adapter("one", bytes(31) + b"1"), Adapter("two", bytes(31) + b"2")
    named, tokens = (one, None, two, one, None, two, one, two, one), (2, 1, 1, 1, 1, 1, 3, 1, 1)
    chunks = []
    for number, (adapter, count) in enumerate(zip(named, tokens, strict=True)):
        request = make_request(str(number), [Text((10 + number,) * 3)], SamplingParams(1), adapter).request
        request.holding.blocks = BlockTable([number])
        chunks.append(Chunk(request, 0, count, samples=False))
    packed, _ = pack(decodes_first(chunks), BLOCK_TOKENS)
    assert packed.num_decodes == 7
    adapted = sorted((rows.digest, packed.ids[rows.start : rows.end].tolist()) for rows in packed.adapted)
    assert adapted == [(one.digest, [10, 10, 16, 16, 16]), (one.digest, [13, 18]), (two.digest, [12, 15, 17])]


def test_ids_of_stored_vectors_are_no_text() -> None:
    plan = make_plan([Text((5, 300, 6))])
    state = PrunedPrompt(plan, [], vocab_size=300)
    assert state.ids.tolist() == [5, 300, 6]
    assert state.text_ids.tolist() == [5, -1, 6]
