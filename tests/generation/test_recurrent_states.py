"""Layers with a recurrent state: answers obey the law wherever chunks end and hits begin, and hits save what they can.

The cases are those in which engines with states in pages of their KV cache have answered wrongly: a prompt one token
longer than a chunk, a hit that ends within a media item, no accepted draft token, a chunk that ends at the last token.
"""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from typing import Any

import jsonschema
import pytest
import torch
from transformers import AutoTokenizer

from gridsieve.services.generation.model.runner import LaunchedStep, Runner, SampledStep
from gridsieve.services.generation.model.states import RESERVED, StateCache
from gridsieve.services.generation.request.batch import Chunk
from gridsieve.services.generation.sampling.sampler import SamplingParams
from gridsieve.services.generation.sampling.structured import Grammars
from tests.generation.paged_kernels import use_paged
from tests.generation.recorder import Recorder
from tests.law import Question, answer, assert_law
from tests.oracle import Text
from tests.tiny import BLOCK_TOKENS, Models, TinyEngine, load_models, random_item

END = 2  # ends a document


@pytest.fixture(scope="module", params=["nemotron_h_omni", "qwen3_5"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Of Mamba2 and of gated delta networks."""
    torch.set_num_threads(1)
    return load_models(request.param, tmp_path_factory.mktemp(request.param))


def text(first: int, tokens: int) -> Text:
    return Text(tuple(10 + (first + place) % 290 for place in range(tokens)))


def computed(engine: TinyEngine, name: str) -> int:
    """Tokens that steps computed for a request, its answer's among them."""
    return sum(end - start for step in engine.runner.steps for each, start, end in step if each == name)


@pytest.mark.parametrize(("tokens", "chunk_tokens"), [(7, 8), (64, 8), (16, 64), (64, 64)])
def test_prompts_that_end_around_the_end_of_a_chunk_obey_the_law(
    models: Models, tokens: int, chunk_tokens: int
) -> None:
    engine = TinyEngine(models.engine, max_num_batched_tokens=chunk_tokens)
    questions = [Question((text(3, tokens),), 5), Question((text(3, tokens + 1),), 5)]
    for asking in questions:
        (asked,) = answer(engine, [asking])
        assert_law(models, engine, [asking], [asked])
    assert asked.request.cached_tokens == (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_another_question_about_a_clip_prefills_its_own_text(models: Models) -> None:
    clip = random_item(models.family, (5, 3, 4), Fraction(1), rate=0.5)
    questions = [Question((text(0, 9), clip, text(50 * number, 11)), 4) for number in (1, 2, 3)]
    engine = TinyEngine(models.engine)
    for number, asking in enumerate(questions):
        (asked,) = answer(engine, [asking])
        assert_law(models, engine, [asking], [asked])
        if number:
            assert asked.spared == (0,)
            span = asked.request.prompt.spans[-1]
            end = span.end // BLOCK_TOKENS * BLOCK_TOKENS
            assert span.offset < end < span.end  # the last rows of the clip are computed again
            tokens = asked.request.prompt.tokens + asking.new_tokens - 1
            assert computed(engine, str(number)) <= tokens - end


@pytest.mark.parametrize("opening", [(), (5, 6, 7)])
def test_each_turn_of_a_chat_prefills_its_own_text(models: Models, opening: tuple[int, ...]) -> None:
    """opening: of an answer, which chat templates add to a prompt, such as `<think>`, and leave out of earlier turns:
    the answer to it is then computed again."""
    parts: tuple[Any, ...] = (text(0, 9), random_item(models.family, (3, 2, 3), Fraction(1), rate=0.5))
    engine = TinyEngine(models.engine, blocks=128)
    for turn in range(5):
        parts = (*parts, text(100 + 13 * turn, 7))
        asking = Question((*parts, Text(opening)), 10)
        (asked,) = answer(engine, [asking])
        assert_law(models, engine, [asking], [asked])
        if turn:
            # Of its answer, the last token is not computed; that of the turn before is.
            own = 7 + 1 + asking.new_tokens - 1
            again = len(opening) + asking.new_tokens - 1 + BLOCK_TOKENS if opening else 0
            assert computed(engine, str(turn)) < own + BLOCK_TOKENS + again
        parts = (*parts, Text(tuple(asked.answer)))


def test_prompts_that_begin_alike_share_the_state_where_they_part(models: Models) -> None:
    """The second one finds where, the third one begins there."""
    engine = TinyEngine(models.engine)
    questions = [Question((text(0, 40), text(60 * number, 20)), 3) for number in (1, 2, 3)]
    found = []
    for asking in questions:
        (asked,) = answer(engine, [asking])
        assert_law(models, engine, [asking], [asked])
        found.append(asked.request.cached_tokens)
    assert found == [0, 0, 40]


@pytest.mark.parametrize("graphs", [False, True])
def test_rejected_and_accepted_draft_tokens_obey_the_law(models: Models, graphs: bool) -> None:
    """Whether all, some or none of the draft tokens are accepted: the states are those after the answer's tokens."""
    engine, capture = TinyEngine(models.engine, max_draft_tokens=4, max_num_batched_tokens=16, blocks=128), Recorder()
    if graphs:
        assert use_paged(engine).runner.capture_decoding(8, 256, capture, 4)
    questions = [Question((Text((20, 21, 22, 20 + number, 21) * 3),), 40) for number in range(6)]
    few = tuple((token, 100.0) for token in (20, 21, 22))  # answers of these repeat what the prompt says
    asked = [
        engine.ask(str(number), each.parts, SamplingParams(40, temperature=1.0, seed=number, logit_bias=few))
        for number, each in enumerate(questions)
    ]
    engine.drain()
    assert_law(models, engine, questions, asked)
    totals = engine.totals
    assert 0 < totals["accepted_draft_tokens"] < totals["draft_tokens"]
    assert (max(capture.replayed, default=1) > 8) == graphs  # steps with drafts


def test_documents_obey_the_law_beside_draft_tokens_and_preemption(models: Models) -> None:
    """Draft tokens that are rejected go back in the states and in the grammar."""
    schema = {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 12, "maxItems": 16}
    grammars = Grammars(models.folder, models.engine.vocab_size, [END])
    wish = SamplingParams(60, temperature=1.0, grammar=grammars.compile(json.dumps(schema)), eos_ids=(END,))
    engine = TinyEngine(models.engine, max_draft_tokens=4, max_num_batched_tokens=16, blocks=40)
    clip = random_item(models.family, (3, 2, 3), Fraction(1), rate=0.5)
    questions = [Question((text(30 * number, 9), clip, text(40 * number, 5)), 60) for number in range(4)]
    asked = [engine.ask(str(number), each.parts, replace(wish, seed=number)) for number, each in enumerate(questions)]
    for each, asking in zip(asked, questions, strict=True):
        engine.deliver(each, 0, clip, asking.kept[0])
    engine.drain()
    engine.engine.check_integrity()
    tokenizer = AutoTokenizer.from_pretrained(models.folder)
    for each in asked:
        *document, end = each.answer
        assert end == END
        jsonschema.validate(json.loads(tokenizer.decode(document)), schema)
    assert_law(
        models,
        engine,
        [replace(asking, new_tokens=len(each.answer)) for asking, each in zip(questions, asked, strict=True)],
        asked,
    )
    totals = engine.totals
    assert 0 < totals["accepted_draft_tokens"] < totals["draft_tokens"]
    assert totals["preemptions"]


def test_rows_that_only_fill_a_replayed_step_write_no_state(models: Models) -> None:
    """One of four answers ends, and three go on in graphs of four rows; its next turn begins with its state."""
    engine = use_paged(TinyEngine(models.engine, blocks=128))
    assert engine.runner.capture_decoding(4, 512, Recorder())
    questions = [Question((text(30 * number, 9 + number),), 30 if number else 8) for number in range(4)]
    asked = answer(engine, questions)
    turn = Question((*questions[0].parts, Text(tuple(asked[0].answer)), text(200, 5)), 4)
    asked += answer(engine, [turn])
    assert asked[-1].request.cached_tokens > 9
    assert_law(models, engine, [*questions, turn], asked)


def test_a_step_that_failed_is_computed_again_from_the_same_states(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, failed = TinyEngine(models.engine), []
    launch = Runner.launch

    def fail_after_the_forward(runner: Runner, chunks: list[Chunk], before: SampledStep | None = None) -> LaunchedStep:
        launched = launch(runner, chunks, before)
        if len(chunks) > 1 and len(failed) < 3:
            failed.append(chunks)
            raise torch.OutOfMemoryError
        return launched

    monkeypatch.setattr(Runner, "launch", fail_after_the_forward)
    questions = [Question((text(30 * number, 9 + number),), 8) for number in range(3)]
    asked = answer(engine, questions)
    monkeypatch.undo()
    assert len(failed) == 3
    for each in asked:  # logits of failed steps were recorded, too
        assert not each.failed
    plain = TinyEngine(models.engine)
    assert [each.answer for each in answer(plain, questions)] == [each.answer for each in asked]


def test_states_take_the_memory_that_their_sizes_say(models: Models) -> None:
    config = models.reference.config.text_config
    if config.model_type == "nemotron_h":
        values = config.mamba_num_heads * config.mamba_head_dim
        inputs = (values + 2 * config.n_groups * config.ssm_state_size) * (config.conv_kernel - 1)
        matrices = values * config.ssm_state_size
    else:
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        inputs = (2 * keys + values) * (config.linear_conv_kernel_dim - 1)
        matrices = values * config.linear_key_head_dim
    layers = config.layer_types.count("linear_attention")
    sizes = models.engine.states
    assert sizes
    assert sizes.bytes == 4 * layers * (inputs + matrices)
    cache = StateCache(sizes, RESERVED + 5, models.engine.embed_tokens.weight)
    held = sum(each.nbytes for each in (*cache.inputs, *cache.matrices))
    assert held == (RESERVED + 5) * sizes.bytes
    attention = config.layer_types.count("full_attention")
    assert models.engine.token_bytes == 4 * 2 * attention * config.num_key_value_heads * config.head_dim
