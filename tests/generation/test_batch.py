"""Windows that start and end anywhere are packed into the text and media rows of the formulas."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.generation.request.batch import Window, decodes_first, pack
from services.generation.request.request import Adapter, Request
from services.generation.sampling.sampler import SamplingParams
from tests.oracle import Item, Text, expected_sequence
from tests.tiny import BLOCK_TOKENS, PAD_ID, make_request

ANSWER = [91, 92, 93, 94, 95]


def video(t: int, h: int, w: int, *texts: Text) -> Item:
    return Item(t, h, w, Fraction(1), np.zeros((t * h * w, 1), np.float32), rate=0.5, texts=texts)


# The slices of the last video are separated by text; the second slice loses both tokens.
PARTS = [
    Text((10, 11, 12)),
    video(3, 2, 2),
    Text((13,)),
    video(2, 1, 3),
    video(1, 2, 2),
    Text((14, 15)),
    video(3, 1, 2, Text((20, 21)), Text((22,)), Text((23,)), Text((24,))),
    Text((16,)),
]
KEPT = [[0, 3, 4, 7, 9, 11], [0, 2, 5], [0, 1, 2, 3], [0, 1, 5]]
EXPECTED = expected_sequence(PARTS, KEPT, PAD_ID)
CUTS = st.tuples(st.integers(0, len(EXPECTED.ids) + 4), st.just(1) | st.integers(1, 30))


def gathered(name: str, blocks: list[int]) -> Request:
    request = make_request(name, PARTS, SamplingParams(8)).request
    for index, kept in enumerate(KEPT):
        request.rope.deliver(index, np.array(kept, np.int32), 1 + index)
    request.output_ids, request.blocks = list(ANSWER), blocks
    return request


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, len(EXPECTED.ids) + 4), st.just(1) | st.integers(1, 30)), min_size=1, max_size=4)
)
def test_packed_windows_are_those_of_the_formulas(cuts: list[tuple[int, int]]) -> None:
    ids = [*EXPECTED.ids, *ANSWER]
    windows = []
    for number, (start, tokens) in enumerate(cuts):
        end = min(start + tokens, len(ids))
        request = gathered(str(number), list(range(40 * number, 40 * number + 10))[::-1])
        windows.append(Window(request, start, end, samples=end % 2 == 0))
    packed, media = pack(decodes_first(windows), BLOCK_TOKENS)
    prompt = len(EXPECTED.ids)
    answer_positions = [(prompt + i + EXPECTED.delta,) * 3 for i in range(len(ANSWER))]
    positions = [*EXPECTED.positions, *answer_positions]
    at = 0
    rows: dict[int, tuple[str, int, int]] = {}
    last_rows: list[int] = []
    ordered = [window for window in windows if window.tokens == 1] + [w for w in windows if w.tokens > 1]
    assert packed.num_decodes == sum(window.tokens == 1 for window in windows)
    for window, context in zip(ordered, packed.contexts, strict=True):
        assert (context.start, context.end) == (window.start, window.end)
        assert context.blocks == [
            block for n, block in enumerate(window.request.blocks) if n * BLOCK_TOKENS < window.end
        ]
        for token in range(window.start, window.end):
            assert packed.ids[at] == ids[token]
            assert tuple(packed.positions[:, at]) == positions[token]
            block = window.request.blocks[token // BLOCK_TOKENS]
            assert packed.slots[at] == block * BLOCK_TOKENS + token % BLOCK_TOKENS
            if token < prompt and (source := EXPECTED.rows[token]):
                rows[at] = (window.request.id, source[0], KEPT[source[0]].index(source[1]))
            at += 1
        if window.samples:
            last_rows.append(at - 1)
    assert packed.ids.size == at
    assert packed.last_rows.tolist() == last_rows
    copied = {
        each.at + n: (each.request.id, each.media_index, each.first_row + n) for each in media for n in range(each.rows)
    }
    assert copied == rows
    assert packed.media_rows.tolist() == sorted(rows)


def test_windows_of_one_adapter_are_adjacent() -> None:
    """Within decodes and within other windows; otherwise the order stays."""
    one, two = Adapter("one", bytes(31) + b"1"), Adapter("two", bytes(31) + b"2")
    named, tokens = (one, None, two, one, None, two, one, two, one), (2, 1, 1, 1, 1, 1, 3, 1, 1)
    windows = []
    for number, (adapter, count) in enumerate(zip(named, tokens, strict=True)):
        request = make_request(str(number), [Text((10 + number,) * 3)], SamplingParams(1), adapter).request
        request.blocks = [number]
        windows.append(Window(request, 0, count, samples=False))
    packed, _ = pack(decodes_first(windows), BLOCK_TOKENS)
    assert packed.num_decodes == 7
    adapted = sorted((rows.digest, packed.ids[rows.start : rows.end].tolist()) for rows in packed.adapted)
    assert adapted == [(one.digest, [10, 10, 16, 16, 16]), (one.digest, [13, 18]), (two.digest, [12, 15, 17])]
