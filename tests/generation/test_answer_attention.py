"""What answers attend to: transformers' plain attention weights over the gathered sequence, for any mix of media,
chunks, neighbours, preemption and prefix hits; and nothing but the same answer where nobody asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.model.attention import weights
from gridsieve.services.generation.model.attention.sdpa import SdpaCache
from gridsieve.services.generation.model.runner import LaunchedStep
from gridsieve.services.generation.request import attending
from gridsieve.services.generation.request.batch import Chunk
from gridsieve.services.generation.request.request import Attended, Finished
from gridsieve.services.generation.sampling.sampler import SamplingParams
from tests.families import text_and_head
from tests.generation.paged_kernels import use_paged
from tests.generation.recorder import Recorder
from tests.generation.test_law import LAW, begins_like
from tests.law import Question, answer, assert_law, question
from tests.oracle import Clip, Text, expected_attention, expected_sequence
from tests.tiny import BLOCK_TOKENS, PAD_ID, Asked, Models, RecordingRunner, TinyEngine, load_models, random_item

TOLERANCE = 1e-4
NAME = "0#attention"
# Three axes and levels that are added to rows; recurrent states between layers that attend; experts.
DENSE, RECURRENT, EXPERTS = "qwen3_vl", "qwen3_5", "qwen3_vl_moe"
dense = pytest.mark.parametrize("family", [DENSE], scope="module")


@pytest.fixture(scope="module")
def models(family: str, tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    return load_models(family, tmp_path_factory.mktemp(family))


def asking(models: Models, rate: float, new_tokens: int = 6, attention: bool = True) -> Question:
    """About a video and a picture."""
    video = random_item(models.family, (4, 2, 3), Fraction(1), rate=rate)
    picture = random_item(models.family, (1, 2, 2), None, seed=6)
    parts = (Text((30, 31, 32)), video, Text((33,)), picture, Text((34, 35, 36)))
    return Question(parts, new_tokens, kept_seed=1, attention=attention)


def attended(asked: Asked) -> Attended:
    """What the answer attended to, which is told once, after its last token and before its end."""
    found, finished = asked.events[-2:]
    assert isinstance(found, Attended)
    assert isinstance(finished, Finished)
    assert finished.completion_tokens == len(asked.answer)
    assert sum(isinstance(each, Attended) for each in asked.events) == 1
    return found


def expected_of(models: Models, asked: Question, answered: Sequence[int]) -> torch.Tensor:
    """float32 [n, M], by transformers."""
    text, _ = text_and_head(models.reference)
    sequence = expected_sequence(asked.parts, asked.kept, PAD_ID)
    return expected_attention(text, sequence, asked.items, answered, models.family.linear)


def assert_attention(models: Models, asked: Question, each: Asked, tolerance: float = TOLERANCE) -> None:
    found, expected = attended(each), expected_of(models, asked, each.answer).numpy()
    assert found.token_ids == tuple(each.answer)
    assert [kept.tolist() for kept in found.kept] == asked.kept
    assert found.token_weights is not None
    np.testing.assert_allclose(found.token_weights, expected, atol=tolerance, rtol=0)
    np.testing.assert_allclose(found.weights, expected.mean(axis=0), atol=tolerance, rtol=0)
    assert_shares(asked, found, expected, tolerance)


def assert_shares(asked: Question, found: Attended, expected: Any, tolerance: float) -> None:
    ends = np.cumsum([0, *map(len, asked.kept)])
    shares = [expected[:, first:end].sum(axis=1) for first, end in pairwise(ends)]
    assert found.token_shares.shape == (len(expected), len(shares))
    for index, share in enumerate(shares):
        np.testing.assert_allclose(found.token_shares[:, index], share, atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", [DENSE, RECURRENT, EXPERTS, "nemotron_nano_vl", "llava_onevision"], scope="module")
@pytest.mark.parametrize("rate", [0.0, 0.75])
def test_weights_are_those_of_plain_attention_over_the_gathered_sequence(models: Models, rate: float) -> None:
    asked = asking(models, rate)
    engine = TinyEngine(models.engine, max_num_batched_tokens=5)  # so that the answer's rows are in several chunks
    (each,) = answer(engine, [asked])
    assert_attention(models, asked, each)
    assert expected_of(models, asked, each.answer).sum(dim=1).max() > 0.1, "a test of weights near 0 shows nothing"
    assert engine.engine.stats().blocks_used == 0


@pytest.mark.parametrize("family", ["qwen2_5_omni"], scope="module")
def test_weights_of_a_clip_whose_pictures_and_sound_take_turns_are_told_item_by_item(models: Models) -> None:
    video = random_item(models.family, (4, 2, 2), Fraction(3), rate=0.25, method="random")
    sound = replace(random_item(models.family, (1, 1, 14), None, seed=1), linear=True)
    asked = Question((Text((30, 31)), Clip(video, sound, 5, 8, 9), Text((32, 33))), 4, attention=True)
    (each,) = answer(TinyEngine(models.engine, max_num_batched_tokens=5), [asked])
    assert [span.media_index for span in each.request.prompt.spans][:3] == [0, 1, 0]
    assert_attention(models, asked, each)


@pytest.mark.parametrize("family", [DENSE, RECURRENT], scope="module")
def test_keys_are_read_from_the_blocks_of_kernels_and_no_graph_is_replayed(models: Models) -> None:
    engine = use_paged(TinyEngine(models.engine, max_num_batched_tokens=8, max_num_seqs=4, overlap=True))
    assert engine.runner.capture_decoding(4, 256, Recorder())
    # The rows of a short answer fit a graph.
    questions = [asking(models, 0.5), Question((Text((30, 31)),), 1, attention=True), asking(models, 0.75, 1)]
    for asked, each in zip(questions, answer(engine, questions, arrivals=[0, 3, 6]), strict=True):
        assert_attention(models, asked, each)


@settings(LAW, max_examples=10)
@given(st.data())
@pytest.mark.parametrize("family", [DENSE, RECURRENT], scope="module")
def test_neither_neighbours_nor_preemption_nor_prefix_hits_change_them(models: Models, data: st.DataObject) -> None:
    """Half of the questions ask, some of them for several answers, in a cache that may be too small for all of them."""
    questions = [data.draw(question(models.family))]
    for _ in range(data.draw(st.integers(1, 3))):
        fresh, other = data.draw(question(models.family)), data.draw(st.sampled_from(questions))
        asked = begins_like(data, models, other) if data.draw(st.booleans()) else fresh
        questions.append(replace(asked, answers=data.draw(st.sampled_from((1, 1, 2)))))
    questions = [replace(each, attention=bool(number % 2 == 0)) for number, each in enumerate(questions)]
    engine = TinyEngine(
        models.engine,
        blocks=max(each.most_blocks for each in questions) + data.draw(st.sampled_from((0, 1, 4, 16))),
        max_num_batched_tokens=data.draw(st.sampled_from((2, 5, 16, 64))),
        max_num_seqs=data.draw(st.integers(1, 4)),
        max_draft_tokens=data.draw(st.sampled_from((0, 3))),
        overlap=data.draw(st.booleans()),
        snapshots=data.draw(st.sampled_from((0, 4, 16))),
    )
    arrivals = data.draw(st.lists(st.sampled_from((0, 0, 1, 3, 8)), min_size=len(questions), max_size=4))
    firsts = answer(engine, questions, arrivals, data.draw(st.lists(st.integers(0, 8), max_size=10)))
    event(f"preempted: {engine.totals['preemptions'] > 0}")
    pairs = [(asked, each) for asked, one in zip(questions, firsts, strict=True) for each in (one, *one.others)]
    assert_law(models, engine, [asked for asked, _ in pairs], [each for _, each in pairs])
    for asked, each in pairs:
        if asked.attention:
            assert_attention(models, asked, each)
        else:
            assert not any(isinstance(event, Attended) for event in each.events)
    assert (engine.engine.stats().blocks_used, engine.engine.stats().states_used) == (0, 0)


@pytest.mark.parametrize("family", [DENSE, RECURRENT], scope="module")
def test_only_who_asks_gets_more_steps_and_the_answer_is_the_same(models: Models) -> None:
    engines = [TinyEngine(models.engine, overlap=overlap) for overlap in (False, False, True)]
    wanted = [asking(models, 0.5, attention=attention) for attention in (False, True, True)]
    asked = [answer(engine, [each])[0] for engine, each in zip(engines, wanted, strict=True)]
    assert asked[0].answer == asked[1].answer == asked[2].answer
    without, with_it, _ = ([[*chunk] for step in engine.runner.steps for chunk in step] for engine in engines)
    assert with_it[: len(without)] == without
    ((name, start, end),) = with_it[len(without) :]  # one more step
    tokens, new_tokens = asked[0].request.prompt.tokens, wanted[0].new_tokens
    # What the answer's rows begin after is in the prefix cache, in whole blocks.
    assert (name, start, end) == (NAME, (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS, tokens + new_tokens - 1)


@dense
def test_of_long_answers_about_many_tokens_the_sums_are_told(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asking(models, 0.5)
    monkeypatch.setattr(attending, "MAX_TOKEN_WEIGHTS", asked.new_tokens * sum(map(len, asked.kept)) - 1)
    monkeypatch.setattr(weights, "PIECE_VALUES", 64)  # a row and a head at a time
    (each,) = answer(TinyEngine(models.engine, max_num_batched_tokens=4), [asked])
    found, expected = attended(each), expected_of(models, asked, each.answer).numpy()
    assert found.token_weights is None
    np.testing.assert_allclose(found.weights, expected.mean(axis=0), atol=TOLERANCE, rtol=0)
    assert_shares(asked, found, expected, TOLERANCE)


@dense
def test_more_than_a_response_holds_is_refused_before_anything_is_computed(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight of each kept token, and of each token of the answer its text and its share of each item."""
    asked = asking(models, 0.5)
    most = sum(map(len, asked.kept)) + asked.new_tokens * (1 + len(asked.items))
    monkeypatch.setattr(attending, "MAX_VALUES", most)
    (each,) = answer(TinyEngine(models.engine), [asked])
    assert_attention(models, asked, each)
    monkeypatch.setattr(attending, "MAX_VALUES", most - 1)
    with pytest.raises(InvalidRequest, match=rf"^sampling\.attention may have {most} values, .* at most {most - 1}"):
        answer(TinyEngine(models.engine), [asked])


@dense
def test_an_answer_without_media_attends_to_text_alone(models: Models) -> None:
    asked = Question((Text((30, 31, 32)),), 3, attention=True)
    (each,) = answer(TinyEngine(models.engine), [asked])
    assert (attended(each).weights.size, attended(each).token_shares.shape) == (0, (3, 0))


@pytest.mark.parametrize(("dtype", "fp8"), [(torch.bfloat16, False), (torch.float32, True)])
@dense
def test_weights_of_other_dtypes_are_near(models: Models, dtype: torch.dtype, fp8: bool) -> None:
    """Keys and queries are rounded as the answer's own attention rounds them."""
    model = load_language_model(Checkpoint(models.folder), dtype, torch.device("cpu"))
    asked = asking(models, 0.5)
    (each,) = answer(TinyEngine(replace(model, fp8_cache=fp8)), [asked])
    assert_attention(models, asked, each, tolerance=0.02)


@pytest.mark.parametrize("place", [(SdpaCache, "read_keys"), (LaunchedStep, "sample")])
@dense
def test_a_step_that_fails_is_computed_again_and_counted_once(
    models: Models, monkeypatch: pytest.MonkeyPatch, place: tuple[type, str]
) -> None:
    """While its layers are computed, and once they are; beside another request, whose answer it does not touch."""
    asked, other, watching = asking(models, 0.5), Question((Text((40, 41)),), 20), [False, False]
    launch, work = RecordingRunner.launch, getattr(*place)

    def launched(runner: RecordingRunner, chunks: Sequence[Chunk], before: Any = None) -> LaunchedStep:
        watching[0] = any(isinstance(chunk.request, attending.Attending) for chunk in chunks)
        return launch(runner, chunks, before)

    def fail_once(*arguments: Any) -> Any:
        if watching == [True, False]:
            watching[1] = True
            raise RuntimeError("injected")
        return work(*arguments)

    monkeypatch.setattr(RecordingRunner, "launch", launched)
    monkeypatch.setattr(*place, fail_once)
    engine = TinyEngine(models.engine)
    each, neighbour = answer(engine, [asked, other])
    assert watching[1]
    assert_attention(models, asked, each)
    assert len(neighbour.answer) == other.new_tokens


@dense
def test_a_request_that_is_cancelled_after_its_answer_leaves_nothing(models: Models) -> None:
    asked, engine = asking(models, 0.5), TinyEngine(models.engine, max_num_batched_tokens=2)
    each = engine.ask("0", asked.parts, SamplingParams(asked.new_tokens, attention=True))
    for index, (item, kept) in enumerate(zip(asked.items, asked.kept, strict=True)):
        engine.deliver(each, index, item, kept)
    while not (engine.runner.steps and engine.runner.steps[-1][0][0] == NAME):
        assert engine.engine.step()
    assert engine.engine.stats().blocks_used > 0
    engine.engine.cancel(each.request)
    engine.drain()
    engine.engine.check_integrity()
    assert engine.engine.stats().blocks_used == 0
    assert each.finished is None


class Ranks:
    """As another rank, of which nothing is asked."""

    def broadcast(self, packed: Any, media_embeds: Any, unread: Any) -> None:
        raise AssertionError("nothing is computed")


@dense
def test_where_it_cannot_be_told_it_is_refused_by_name(models: Models) -> None:
    engines = {
        "--tensor-parallel": TinyEngine(models.engine, workers=Ranks()),
        "--deterministic": TinyEngine(replace(models.engine, deterministic=True)),
    }
    for flag, engine in engines.items():
        with pytest.raises(InvalidRequest, match=flag) as raised:
            engine.ask("0", [Text((30,))], SamplingParams(2, attention=True))
        assert (raised.value.field, raised.value.value) == ("sampling.attention", "True")
        assert engine.engine.stats().waiting == 0
