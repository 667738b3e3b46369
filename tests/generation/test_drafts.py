"""EAGLE-3 heads and MTP: their drafts are those of the whole sequence without a cache, and change no answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2_5_VLTextConfig, Qwen3VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.generation.engine.payoff import ALONE, PERIOD, Payoff
from gridsieve.services.generation.engine.speculation import Room
from gridsieve.services.generation.loading.draft_head import load_draft_head
from gridsieve.services.generation.memory.lease import Borrowed, Lease
from gridsieve.services.generation.model.drafting import Drafter
from gridsieve.services.generation.request.batch import Chunk
from gridsieve.services.generation.request.request import Request
from gridsieve.services.generation.sampling.sampler import SamplingParams
from gridsieve.services.generation.sampling.structured import ANY_OBJECT, Grammars
from gridsieve.services.generation.settings import GenerationSettings
from gridsieve.services.generation.startup.build import build
from tests.drafts import ANGELSLIM, MTP, SPECFORGE, head_tokens, mtp_tokens, write_head, write_mtp
from tests.families import text_and_head
from tests.generation.paged_kernels import use_paged
from tests.generation.recorder import Recorder
from tests.generation.test_law import LAW, assert_law_of_any_mix
from tests.law import Question, answer, assert_law, several_questions
from tests.oracle import Text, expected_sequence
from tests.tiny import PAD_ID, Models, TinyEngine, load_models, make_request, random_item

ALL = (("qwen2_5_vl", SPECFORGE), ("qwen3_vl", ANGELSLIM), ("qwen3_5", MTP))


def heads(*more: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("family", "architecture"), [*ALL, *more], scope="module")


@pytest.fixture(scope="module")
def drafted(family: str, architecture: str, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A model with a random head of a published layout, or with random weights for MTP."""
    torch.set_num_threads(1)
    models = load_models(family, tmp_path_factory.mktemp(family))
    if architecture == MTP:
        flags = ["--model", str(write_mtp(models.folder)), "--draft-model", "mtp", "--device", "cpu"]
        settings = GenerationSettings.load([*flags, "--max-num-seqs", "4", "--kv-cache-tokens", "256"])
        built = build(settings, Checkpoint(models.folder))
        assert built.state_slots >= 3 * 4
        return replace(models, engine=built.runner.model)
    folder = write_head(models.folder / "head", architecture, models.engine.hidden_size, models.engine.vocab_size)
    return replace(models, engine=replace(models.engine, draft=load_draft_head(Checkpoint(folder), models.engine)))


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_5"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Without recurrent states and with them."""
    torch.set_num_threads(1)
    return load_models(request.param, tmp_path_factory.mktemp("both"))


@settings(LAW, max_examples=6)
@given(st.data())
@heads(pytest.param("qwen3_5", SPECFORGE, marks=pytest.mark.deep))
def test_the_law_holds_whatever_a_head_drafts(drafted: Models, data: st.DataObject) -> None:
    """In each step, or in some. The head never fails."""
    payoff = data.draw(st.sampled_from([None, Sometimes()]))
    with patch.object(Drafter, "forget", side_effect=AssertionError):
        assert_law_of_any_mix(drafted, data, payoff)


@heads(("qwen3_vl", SPECFORGE), pytest.param("qwen3_5_moe", MTP, marks=pytest.mark.deep))
def test_drafts_are_those_of_the_whole_sequence_without_a_cache(drafted: Models) -> None:
    """In chunks of each size, over prefix hits, for siblings, where media arrive in parts, and after plain steps, each
    of which is read after the next one was launched."""
    video = random_item(drafted.family, (4, 2, 3), Fraction(1), rate=0.5)
    picture = random_item(drafted.family, (1, 2, 2), None, seed=6)
    questions = [Question((Text((30, 31, 32)), video, Text((33,)), picture, Text((34, 35))), 24, answers=2)] * 2
    compared = 0
    for chunk_tokens, payoff in ((3, None), (9, Sometimes()), (64, Sometimes())):
        tiny = TinyEngine(
            drafted.engine,
            max_num_batched_tokens=chunk_tokens,
            max_draft_tokens=3,
            overlap=payoff is not None,
            payoff=payoff,
        )
        seen = record(tiny)
        asked = answer(tiny, questions, (0, 40), (2, 5), [(2, 2, 2), ()])
        assert_law(
            drafted, tiny, [each for each in questions for _ in range(2)], [a for b in asked for a in (b, *b.others)]
        )
        assert asked[1].request.cached_tokens
        answers = {each.request.id: each.answer for first in asked for each in (first, *first.others)}
        for name, known, tokens in seen:
            expected, margin = expected_drafts(drafted, questions[0], answers[name][:known], len(tokens))
            if margin > 1e-3:
                assert tokens == expected
                compared += 1
    assert compared > 15


class Sometimes(Payoff):
    """Drafting pays in some steps, in one after more than rows wait."""

    def __init__(self) -> None:
        super().__init__(Room())
        self._number = 0

    def begin_step(self, sequences: int) -> None:
        self._number += 1

    def propose(self, limits: Mapping[Request, int]) -> dict[Request, tuple[int, ...]]:
        pays = self._number % 9 < 2 if self._number < 40 else self._number % 20 == 0
        return Room().propose(limits) if pays else {}


def record(tiny: TinyEngine) -> list[tuple[str, int, list[int]]]:
    """What the head drafts from now on: the request, the tokens of its answer so far, and the drafts."""
    drafter, seen = tiny.runner.drafter, list[tuple[str, int, list[int]]]()
    assert drafter
    draft = drafter.draft

    def recorded(chunks: Sequence[Chunk]) -> list[Chunk]:
        found = draft(chunks)
        seen.extend(
            (each.request.id, len(each.request.output_ids), list(each.draft_tokens))
            for each in found
            if each.draft_tokens
        )
        return found

    drafter.draft = recorded  # type: ignore[method-assign]
    return seen


@torch.no_grad()
def expected_drafts(models: Models, question: Question, said: list[int], count: int) -> tuple[list[int], float]:
    """By transformers' text model and the weights of the head, or MTP, over the gathered sequence."""
    head = models.folder / "head"
    expected = expected_sequence(question.parts, question.kept, PAD_ID)
    text, _ = text_and_head(models.reference)
    embedding: Tensor = text.get_input_embeddings().weight
    embeds = embedding[torch.tensor([*expected.ids, *said])].clone()
    levels: list[list[Tensor]] = [[] for _ in range(models.engine.embed_levels)]
    rows = [row for row, source in enumerate(expected.rows) if source]
    for row in rows:
        item, token = expected.rows[row] or (0, 0)
        embeds[row] = torch.from_numpy(question.items[item].embeds[token])
        for level, features in zip(levels, question.items[item].deepstack, strict=True):
            level.append(torch.from_numpy(features[token]))
    answered = [(len(expected.ids) + index + expected.delta,) * 3 for index in range(len(said))]
    positions = torch.tensor([*expected.positions, *answered]).T
    before, after = list[Tensor](), list[Tensor]()
    hooks = [layer.register_forward_pre_hook(lambda _, inputs: after.append(inputs[0][0])) for layer in text.layers]
    hooks += [layer.register_forward_hook(lambda _, __, output: before.append(output[0])) for layer in text.layers]
    more: dict[str, Any] = {}
    if levels:
        more = {"visual_pos_masks": torch.zeros(1, len(embeds), dtype=torch.bool)}
        more["visual_pos_masks"][0, rows] = True
        more["deepstack_visual_embeds"] = [torch.stack(level) for level in levels]
    mask = torch.ones(1, len(embeds), dtype=torch.long)
    last: Tensor = text(
        inputs_embeds=embeds[None], attention_mask=mask, position_ids=positions[:, None], use_cache=False, **more
    ).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    if not head.exists():
        return mtp_tokens(models.folder, models.reference, embeds[1:], last[:-1], positions[:, :-1], count)
    config, weights = Checkpoint(head).config, load_file(head / "model.safetensors")
    # Of the three layers: the third, the second, and the first.
    states = after[2::-1] if config["architectures"] == [ANGELSLIM] else [before[1], before[0], after[0]]
    states = [each[:-1] for each in states]
    rope = {
        "rope_type": "default",
        "rope_theta": config["rope_theta"],
        "mrope_section": config["rope_scaling"]["mrope_section"],
    }
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 16, "rope_parameters": rope}
    rotary = (
        Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(**sizes))
        if config["rope_scaling"].get("mrope_interleaved")
        else Qwen2_5_VLRotaryEmbedding(Qwen2_5_VLTextConfig(**sizes))
    )
    ahead = config["architectures"] == [SPECFORGE]
    positions = positions[:, 1:] if ahead else positions[:, :-1]
    return head_tokens(weights, rotary, embeds[1:], states, positions, embedding, count)


class Scripted:
    """Drafts, of which as many are right as a script says, step by step; the rest are wrong."""

    def __init__(self, answer: Sequence[int], script: Sequence[int]) -> None:
        self._answer, self._script = answer, list(script)
        self.accepted: list[int] = []

    def draft(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        return [self._drafted(chunk) for chunk in chunks]

    def _drafted(self, chunk: Chunk) -> Chunk:
        if not chunk.draft_tokens:
            return chunk
        said, size = len(chunk.request.output_ids), chunk.num_draft_tokens
        right = min(self._script.pop(0) if self._script else size, size)
        tokens = list(self._answer[said : said + size])
        tokens[right:] = [token + 1 if token < 100 else token - 1 for token in tokens[right:]]
        self.accepted.append(right)
        return Chunk(chunk.request, chunk.start, chunk.end, True, tuple(tokens))

    def extend(self, *_: object) -> None:
        pass


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=20), st.integers(1, 4), st.sampled_from((0.0, 0.8)))
def test_any_number_of_drafts_may_be_right(both: Models, script: list[int], most: int, temperature: float) -> None:
    """None and all of them included: the answer is that without drafts, in as many steps fewer as drafts were right."""
    models = both
    params = SamplingParams(20, temperature=temperature, seed=3)
    plain = TinyEngine(models.engine)
    expected = plain.ask("a", [Text((20, 21, 22))], params)
    plain.drain()
    tiny, scripted = scripted_engine(models, expected.answer, script, most)
    asked = tiny.ask("a", [Text((20, 21, 22))], params)
    tiny.drain()
    tiny.engine.check_integrity()
    assert asked.answer == expected.answer
    assert len(tiny.runner.steps) == len(plain.runner.steps) - sum(scripted.accepted)
    finished = asked.finished
    assert finished
    assert finished.accepted_draft_tokens == sum(scripted.accepted) <= finished.draft_tokens


def scripted_engine(
    models: Models, said: Sequence[int], script: Sequence[int], most: int
) -> tuple[TinyEngine, Scripted]:
    tiny, scripted = drafting_engine(models, most)[0], Scripted(said, script)
    tiny.runner.drafter = scripted  # type: ignore[assignment]
    return tiny, scripted


def drafting_engine(models: Models, most: int) -> tuple[TinyEngine, Drafter]:
    folder = models.folder / "head"
    if not folder.exists():
        write_head(folder, SPECFORGE, models.engine.hidden_size, models.engine.vocab_size)
    head = load_draft_head(Checkpoint(folder), models.engine)
    tiny = TinyEngine(replace(models.engine, draft=head), max_draft_tokens=most)
    assert tiny.runner.drafter
    return tiny, tiny.runner.drafter


@pytest.mark.parametrize(("family", "architecture"), ALL[:1], scope="module")
def test_more_than_64_requests_draft_together(drafted: Models) -> None:
    questions = several_questions(drafted.family) * 12
    tiny = TinyEngine(drafted.engine, 72 * 16, 512, max_num_seqs=72, max_draft_tokens=2)
    plain = TinyEngine(replace(drafted.engine, draft=None), 72 * 16, 512, max_num_seqs=72)
    rows = list[int]()
    seen = record(tiny)
    asked = answer(tiny, questions)
    assert [each.answer for each in asked] == [each.answer for each in answer(plain, questions)]
    rows = [len(step) for step in tiny.runner.steps]
    assert max(rows) > 64
    assert len(seen) > 64


@heads()
def test_drafts_end_with_the_cache_and_the_answer(drafted: Models) -> None:
    """A request that fills all blocks, to the last slot but one."""
    question = Question((Text(tuple(range(10, 20))),), 7)
    tiny = TinyEngine(drafted.engine, blocks=question.most_blocks, max_draft_tokens=5)
    seen = record(tiny)
    asked = answer(tiny, [question])
    assert_law(drafted, tiny, [question], asked)
    assert [len(tokens) for _, known, tokens in seen] == [min(5, 7 - known - 1) for _, known, _ in seen] != []


@pytest.mark.usefixtures("rows_overwritten")
@heads()
@pytest.mark.parametrize("payoff", [None, "sometimes"])
def test_replayed_steps_are_drafted_for(drafted: Models, payoff: str | None) -> None:
    """Those that are read after the next one was launched, too."""
    questions = several_questions(drafted.family)
    eager = TinyEngine(drafted.engine, max_draft_tokens=2, payoff=Sometimes() if payoff else None)
    seen = record(eager)
    expected = [each.answer for each in answer(eager, questions)]
    engine = TinyEngine(drafted.engine, max_draft_tokens=2, overlap=True, payoff=Sometimes() if payoff else None)
    tiny = use_paged(engine)
    capture = Recorder()
    assert tiny.runner.capture_decoding(8, 256, capture, 2)
    steps = [40, 20, 10, 8, 5, 4, 2, 1] if drafted.engine.states else [24, 16, 8, 8, 4, 4, 2, 2, 1]
    assert capture.captured == [*steps, 8, 4, 2, 1]
    replayed = record(tiny)
    with patch.object(Drafter, "_after", side_effect=AssertionError):  # the head is replayed, too
        assert [each.answer for each in answer(tiny, questions)] == expected
    assert replayed == seen


@pytest.mark.deep
@pytest.mark.parametrize(
    ("family", "architecture"),
    [("qwen3_5", MTP), ("qwen2_5_vl", SPECFORGE), ("qwen3_vl", ANGELSLIM)],
    scope="module",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own code
def test_a_compiled_head_drafts_what_an_eager_one_does(drafted: Models) -> None:
    seen = list[list[tuple[str, int, list[int]]]]()
    for compiled in (False, True):
        tiny = TinyEngine(drafted.engine, max_draft_tokens=3)
        if compiled:
            assert tiny.runner.compile()
        seen.append(record(tiny))
        answer(tiny, several_questions(drafted.family))
    assert seen[0] == seen[1] != []


def test_drafts_that_a_grammar_forbids_are_left_out(both: Models) -> None:
    models = both
    grammar = Grammars(models.folder, models.engine.vocab_size, [1]).compile(ANY_OBJECT)
    params = SamplingParams(8, eos_ids=(1,), grammar=grammar)
    plain = TinyEngine(models.engine)
    expected = plain.ask("a", [Text((20, 21, 22))], params)
    plain.drain()
    tiny, drafter = drafting_engine(models, 3)
    wrong = [models.engine.vocab_size - 1, 20, 21]
    drafter._guess = lambda chunks: [wrong[: chunk.num_draft_tokens] for chunk in chunks]  # type: ignore[method-assign]
    tiny.engine._stepper._payoff = told = Mock(Payoff)
    asked = tiny.ask("a", [Text((20, 21, 22))], params)
    tiny.drain()
    assert asked.answer == expected.answer
    assert asked.finished
    assert asked.finished.draft_tokens == 0
    # Each step took the head's time, which brought nothing.
    assert {call.args[1] for call in told.count_step.call_args_list} == {True}
    assert {call.args for call in told.count_drafts.call_args_list} == {(asked.request, 0)}


def test_a_step_is_computed_without_drafts_if_drafting_fails(both: Models) -> None:
    tiny, drafter = drafting_engine(both, 3)
    failures = iter([torch.OutOfMemoryError("a test"), *[None] * 99])

    def failing(chunks: Sequence[Chunk]) -> list[list[int]]:
        if error := next(failures):
            raise error
        return [[0] * chunk.num_draft_tokens for chunk in chunks]

    drafter._guess = failing  # type: ignore[method-assign]
    asked = tiny.ask("a", [Text((20, 21, 22))], SamplingParams(8))
    tiny.drain()
    assert asked.finished
    assert asked.finished.draft_tokens


@heads()
@pytest.mark.parametrize("live", [False, True])
def test_the_head_leaves_out_a_request_that_has_lost_its_blocks_when_its_step_is_read(
    drafted: Models, live: bool
) -> None:
    tiny = TinyEngine(drafted.engine, max_num_batched_tokens=4, max_draft_tokens=3, overlap=True, live_blocks=8)
    request = make_request("a", [Text(tuple(range(20, 30)))], SamplingParams(8)).request
    if live:
        lease = Lease(8)
        tiny.engine.open(lease)
        tiny.engine.step()
        request.holding = Borrowed(lease, 0, lambda computed, said: False)
    tiny.engine.submit(request)
    tiny.engine.step()
    tiny.engine.cancel(request)
    with patch.object(Drafter, "forget", side_effect=AssertionError("drafting failed")):
        tiny.drain()
    assert tiny.engine.stats().blocks_used == 8 * live


def test_requests_draft_while_that_brings_a_step_more_than_it_costs() -> None:
    payoff = Payoff(Room())
    good, bad, *others = (make_request(str(number), [Text((1,))], SamplingParams(9)).request for number in range(64))

    def step(requests: Sequence[Request], with_drafts_s: float) -> tuple[bool, bool]:
        found = payoff.propose(dict.fromkeys(requests, 3))
        assert payoff.propose(dict.fromkeys(requests, 3)) == found
        payoff.begin_step(len(requests))
        payoff.count_step(len(requests), bool(found), with_drafts_s if found else 1.0)
        for each in found:
            payoff.count_drafts(each, 2 * (each is good))
        return good in found, bad in found

    found = [step((good, bad), 1.5) for _ in range(2 * PERIOD)]
    assert set(found[:ALONE]) == set(found[PERIOD : PERIOD + ALONE]) == {(False, False)}  # measured
    assert found[ALONE] == found[PERIOD // 2] == (True, True)
    assert set(found[PERIOD + ALONE : PERIOD + PERIOD // 2]) == {(True, False)}
    # One that gains two tokens is not worth a fifth of the step of 64.
    loaded = [step((good, bad, *others), 1.2) for _ in range(PERIOD // 2)]
    assert set(loaded[PERIOD // 4 :]) == {(False, False)}
    assert [step((good, bad), 1.5) for _ in range(ALONE + 1)][-1] == (True, False)
