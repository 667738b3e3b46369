"""Replayed decode steps compute the same as eager ones.

Runs without CUDA: a fake capture recomputes at every replay, over buffers that are overwritten after each use.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridsieve.services.generation.engine.stats import Step
from gridsieve.services.generation.sampling.sampler import SamplingParams
from tests.generation.paged_kernels import layers_by_flash_infer, use_paged
from tests.generation.recorder import Recorder
from tests.law import Question, answer, assert_law, question
from tests.oracle import Text
from tests.tiny import Models, TinyEngine, load_models, random_item

DEEP = ("llava", "llava_pixtral", "nemotron_h_omni", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
FAMILY_PARAMS = ["llava_onevision", "qwen3_5", *(pytest.param(name, marks=pytest.mark.deep) for name in DEEP)]


@pytest.fixture(scope="module", params=FAMILY_PARAMS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    with layers_by_flash_infer():
        return load_models(request.param, tmp_path_factory.mktemp(request.param))


def answers(models: Models, tiny: TinyEngine, prompts: list[int], new_tokens: int, rate: float) -> list[list[int]]:
    """Answers to prompts of these many tokens, every other one with a video; a request begins in each step."""
    questions = []
    for number, tokens in enumerate(prompts):
        video = random_item(models.family, (3, 2, 2), Fraction(1), seed=number, rate=rate)
        text = Text(tuple(range(10 + number, 10 + number + tokens)))
        questions.append(Question((text, video, Text((5, 6))) if number % 2 else (text,), new_tokens + number % 3))
    return [asked.answer for asked in answer(tiny, questions, arrivals=range(len(prompts)))]


@pytest.mark.usefixtures("rows_overwritten")
@settings(max_examples=4)
@given(data=st.data(), chunk_tokens=st.sampled_from([3, 8, 64]), most_drafts=st.sampled_from([0, 0, 2]))
def test_the_law_holds_over_flash_infer(
    models: Models, data: st.DataObject, chunk_tokens: int, most_drafts: int
) -> None:
    """Chunks, replayed steps, drafts, prefix hits and preemption, over kernels that read what they are planned with."""
    questions = [data.draw(question(models.family)) for _ in range(data.draw(st.integers(1, 3)))]
    questions += [replace(each, parts=(*each.parts, Text((30, 31)))) for each in questions]
    tiny = TinyEngine(
        models.engine,
        blocks=max(each.most_blocks for each in questions) + data.draw(st.sampled_from((0, 3, 16))),
        max_num_batched_tokens=chunk_tokens,
        max_num_seqs=4,
        max_draft_tokens=most_drafts,
        overlap=data.draw(st.booleans()),
    )
    assert use_paged(tiny).runner.capture_decoding(4, 1024, Recorder(), most_drafts)
    assert_law(
        models, tiny, questions, answer(tiny, questions, arrivals=data.draw(st.permutations(range(len(questions)))))
    )


@pytest.mark.usefixtures("rows_overwritten")
def test_each_step_is_one_forward_and_replayed_if_every_row_follows_an_answer(models: Models) -> None:
    """Chunks of prompts, media and draft tokens: a second forward in a step would read all weights twice."""
    capture, steps, forwards = Recorder(), list[Step](), list[int]()
    tiny = TinyEngine(models.engine, max_num_batched_tokens=6, max_num_seqs=4, max_draft_tokens=2, on_step=steps.append)
    use_paged(tiny).runner.capture_decoding(4, 256, capture, 2)
    most = 5 if models.engine.states else 3
    assert capture.captured == ([20, 10, 5, 4, 2, 1] if models.engine.states else [12, 8, 4, 4, 2, 2, 1])
    assert len({output.data_ptr() for output in capture.outputs}) == 1
    plain = TinyEngine(models.engine, max_num_batched_tokens=6, max_num_seqs=4, max_draft_tokens=2)
    expected = answers(models, plain, [5, 30, 9, 22], 24, 0.5)
    counting = models.engine.text.register_forward_hook(lambda *_: forwards.append(1))
    assert answers(models, tiny, [5, 30, 9, 22], 24, 0.5) == expected
    counting.remove()

    def of_answers(name: str, start: int, end: int) -> bool:
        return start >= tiny.runner._requests[name].prompt.tokens - 1

    def of_sampled_text(name: str, start: int, end: int) -> bool:
        prompt = tiny.runner._requests[name].prompt
        media = any(span.offset < end and start < span.end for span in prompt.spans)
        return end >= prompt.tokens and end - start <= most and not media

    for step, chunks in zip(steps, tiny.runner.steps, strict=True):
        assert (
            all(of_answers(*each) for each in chunks) <= step.replayed <= all(of_sampled_text(*each) for each in chunks)
        )
    replayed = [step.replayed for step in steps]
    drafted = [any(end - start > 1 for _, start, end in step) for step in tiny.runner.steps]
    assert {*zip(replayed, drafted, strict=True)} >= {(True, True), (True, False)}
    assert not all(replayed)
    assert len(forwards) == len(steps) == len(tiny.runner.steps)


def test_a_cache_that_gathers_is_not_captured(models: Models) -> None:
    assert not TinyEngine(models.engine).runner.capture_decoding(6, 256, Mock(side_effect=AssertionError))


def test_a_prompt_of_chunks_of_one_token_is_not_replayed(models: Models) -> None:
    """Nothing is sampled, so nothing would synchronise before the next replay reuses the pinned rows."""
    capture, tiny = Recorder(), use_paged(TinyEngine(models.engine, max_num_batched_tokens=1))
    tiny.runner.capture_decoding(2, 256, capture)
    asked = tiny.ask("0", [Text(tuple(range(10, 40)))], SamplingParams(8))
    tiny.drain()
    assert len(asked.answer) == len(capture.replayed) == 8


def test_a_model_that_cannot_be_captured_runs_eagerly(models: Models) -> None:
    tiny = use_paged(TinyEngine(models.engine))
    assert not tiny.runner.capture_decoding(4, 64, Mock(side_effect=RuntimeError("not permitted when capturing")))
    assert len(answers(models, tiny, [3], 4, 0.0)[0]) == 4
