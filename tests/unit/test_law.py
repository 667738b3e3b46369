"""The law: whatever is chunked, batched, pruned, preempted or late, the log-probabilities are those of one unchunked
forward of transformers' own text model over the gathered sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from services.generation.sampler import SamplingParams
from tests.oracle import Item, Text, expected_logprobs, expected_sequence, kept_tokens
from tests.tiny import BLOCK_TOKENS, PAD_ID, Asked, Models, TinyEngine, load_models

LOGPROB_TOLERANCE = 1e-4
CLEAR_MARGIN = 2e-4
HIDDEN = 64


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    return load_models(tmp_path_factory.mktemp("tiny"))


@dataclass(frozen=True)
class Question:
    parts: tuple[Text | Item, ...]
    new_tokens: int

    @property
    def items(self) -> list[Item]:
        return [part for part in self.parts if isinstance(part, Item)]

    @property
    def kept(self) -> list[list[int]]:
        return [kept_tokens(item, seed) for seed, item in enumerate(self.items)]

    @property
    def most_tokens(self) -> int:
        texts = sum(len(part.ids) for part in self.parts if isinstance(part, Text))
        return texts + sum(item.kept_count for item in self.items) + self.new_tokens


def text(*, least: int = 1, most: int = 12) -> st.SearchStrategy[Text]:
    return st.lists(st.integers(10, 300), min_size=least, max_size=most).map(lambda ids: Text(tuple(ids)))


@st.composite
def item(draw: st.DrawFn, video: bool) -> Item:
    t = draw(st.integers(1, 5)) if video else 1
    h, w = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    # 2/3 is what 1.5 fps gives; the odd one is 23.976 fps sampled every twelve frames, times two a second.
    steps = (Fraction(1), Fraction(2, 3), Fraction(2 * 12 * 2002, 48000), Fraction(7))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return Item(
        t=t,
        h=h,
        w=w,
        time_step=draw(st.sampled_from(steps)) if video else None,
        embeds=random.normal(0, 0.3, (t * h * w, HIDDEN)).astype(np.float32),
        rate=draw(st.sampled_from((0.0, 0.25, 0.5, 0.75, 0.9))),
        method=draw(st.sampled_from(("evs", "random", "none"))),
    )


IMAGE, VIDEO = item(video=False), item(video=True)
MIXES: tuple[tuple[st.SearchStrategy[Text | Item], ...], ...] = (
    (text(most=30),),
    (text(), IMAGE, text()),
    (text(), VIDEO, text()),
    (VIDEO, text()),
    (text(), IMAGE, text(), VIDEO, text()),
    (text(), VIDEO, IMAGE, text()),
    (text(), VIDEO, text(), VIDEO, text()),
    (text(), VIDEO),
)


@st.composite
def question(draw: st.DrawFn) -> Question:
    mix = draw(st.sampled_from(MIXES))
    return Question(tuple(draw(part) for part in mix), draw(st.integers(1, 12)))


def answer(
    engine: TinyEngine, questions: Sequence[Question], arrivals: Sequence[int] = (), deliveries: Sequence[int] = ()
) -> list[Asked]:
    """Asks question i before step arrivals[i] and delivers the n-th media item deliveries[n] steps after that."""
    asked: list[Asked] = []
    due: dict[int, list[tuple[Asked, int, Item, list[int]]]] = {}
    delays = list(deliveries)
    waiting = [(arrivals[i] if i < len(arrivals) else 0, i) for i in range(len(questions))]
    step = 0
    while waiting or due or any(not each.finished for each in asked):
        for each in sorted(waiting):
            if each[0] > step:
                continue
            waiting.remove(each)
            asking = questions[each[1]]
            asked.append(engine.ask(str(each[1]), asking.parts, SamplingParams(asking.new_tokens)))
            for index, (media, kept) in enumerate(zip(asking.items, asking.kept, strict=True)):
                due.setdefault(step + (delays.pop(0) if delays else 0), []).append((asked[-1], index, media, kept))
        for delivery in due.pop(step, []):
            engine.deliver(*delivery)
        engine.engine.step()
        engine.engine.check_integrity()
        assert not any(each.failed for each in asked)
        step += 1
        assert step < 5000, "the engine stands still"
    return asked


def assert_law(models: Models, engine: TinyEngine, questions: Sequence[Question], asked: Sequence[Asked]) -> None:
    text_model, lm_head = models.reference.model.language_model, models.reference.lm_head
    for each in asked:
        name = each.request.id
        asking = questions[int(name)]
        expected = expected_sequence(asking.parts, asking.kept, PAD_ID)
        assert each.request.rope.tokens == len(expected.ids)
        assert len(each.answer) == asking.new_tokens
        reference = expected_logprobs(text_model, lm_head, expected, asking.items, each.answer)
        computed = torch.stack(engine.runner.logits[name]).log_softmax(dim=-1)
        assert computed.shape == reference.shape
        worst = float((computed - reference).abs().max())
        assert worst < LOGPROB_TOLERANCE, f"question {name} is {worst} off"
        best, second = reference.topk(2, dim=-1).values.T
        clear = best - second > CLEAR_MARGIN
        assert torch.equal(torch.tensor(each.answer)[clear], reference.argmax(dim=-1)[clear])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_log_probabilities_do_not_depend_on_chunks_neighbours_lateness_or_preemption(
    models: Models, data: st.DataObject
) -> None:
    questions = data.draw(st.lists(question(), min_size=2, max_size=5))
    least_blocks = max(-(-each.most_tokens // BLOCK_TOKENS) for each in questions)
    engine = TinyEngine(
        models.engine,
        blocks=least_blocks + data.draw(st.sampled_from((0, 1, 2, 4, 16))),
        chunk_tokens=data.draw(st.sampled_from((1, 2, 3, 5, 8, 16, 64, 512))),
        max_running=data.draw(st.integers(1, 4)),
    )
    arrivals = data.draw(st.lists(st.integers(0, 8), max_size=5))
    deliveries = data.draw(st.lists(st.integers(0, 20), max_size=10))
    asked = answer(engine, questions, arrivals, deliveries)
    event(f"preempted: {engine.engine.stats().preemptions_total > 0}")
    event(f"reclaimed: {any(each.request.reclaimed for each in asked)}")
    assert_law(models, engine, questions, asked)
    assert engine.engine.stats().blocks_used == 0


@pytest.mark.parametrize("chunk_tokens", [1, 7, 512])
def test_ten_images_in_one_prompt_obey_the_law(models: Models, chunk_tokens: int) -> None:
    random = np.random.default_rng(5)
    parts: list[Text | Item] = []
    for number in range(10):
        h, w = 1 + number % 3, 1 + number % 4
        parts += [Text((20 + number,)), Item(1, h, w, None, random.normal(0, 0.3, (h * w, HIDDEN)).astype(np.float32))]
    questions = [Question((*parts, Text((5, 6, 7))), 4)]
    engine = TinyEngine(models.engine, chunk_tokens=chunk_tokens)
    assert_law(models, engine, questions, answer(engine, questions, deliveries=[9, 8, 7, 6, 5, 4, 3, 2, 1, 0]))


def test_preempted_answers_obey_the_law(models: Models) -> None:
    """Three questions that fit one by one and, as their answers grow, not together."""
    random = np.random.default_rng(6)
    video = Item(4, 2, 2, Fraction(1), random.normal(0, 0.3, (16, HIDDEN)).astype(np.float32), rate=0.5)
    questions = [Question((Text((30 + i, 31, 32)), video, Text((40, 41))), 16) for i in range(3)]
    engine = TinyEngine(models.engine, blocks=13, chunk_tokens=32)
    asked = answer(engine, questions)
    assert engine.engine.stats().preemptions_total > 0
    assert_law(models, engine, questions, asked)


def test_late_media_and_reclaimed_blocks_obey_the_law(models: Models) -> None:
    """The text before a video is prefilled, loses its blocks to another question, and is prefilled again in the end."""
    random = np.random.default_rng(8)
    video = Item(2, 2, 2, Fraction(1), random.normal(0, 0.3, (8, HIDDEN)).astype(np.float32))
    questions = [
        Question((Text(tuple(range(10, 26))), video, Text((7,))), 3),
        Question((Text(tuple(range(100, 126))),), 5),
    ]
    engine = TinyEngine(models.engine, blocks=8, chunk_tokens=64)
    asked = answer(engine, questions, arrivals=[0, 2], deliveries=[6])
    early = [window for step in engine.runner.steps for window in step if window[0] == "0"]
    assert early[:2] == [("0", 0, 16), ("0", 0, 25)]
    assert_law(models, engine, questions, asked)


@pytest.mark.parametrize(
    ("grids", "chunk_tokens"),
    [([("image", 1, 2, 3)], 512), ([("video", 3, 2, 4)], 5), ([("image", 1, 3, 2), ("video", 4, 4, 4)], 16)],
)
def test_at_rate_0_answers_are_those_of_transformers_generate(
    models: Models, grids: list[tuple[str, int, int, int]], chunk_tokens: int
) -> None:
    """The whole model with pixels, where t stays within max(h, w): there its positions are the formula's."""
    reference, config = models.reference, models.reference.config
    generator = torch.Generator().manual_seed(3)
    parts: list[Text | Item] = [Text((300, 301))]
    inputs: dict[str, torch.Tensor] = {}
    for kind, t, h, w in grids:
        pixels = torch.randn(t * h * w * 4, 3 * 2 * 14 * 14, generator=generator)
        grid = torch.tensor([[t, 2 * h, 2 * w]])
        video = kind == "video"
        with torch.no_grad():
            features = (reference.get_video_features if video else reference.get_image_features)(pixels, grid)
        embeds = features.pooler_output[0].numpy()
        parts += [Item(t, h, w, Fraction(1) if video else None, embeds), Text((302, 303, 304))]
        inputs |= (
            {"pixel_values_videos": pixels, "video_grid_thw": grid, "second_per_grid_ts": torch.tensor([0.5])}
            if video
            else {"pixel_values": pixels, "image_grid_thw": grid}
        )
    questions = [Question(tuple(parts), 12)]
    engine = TinyEngine(models.engine, chunk_tokens=chunk_tokens)
    asked = answer(engine, questions)[0]
    kinds = [0 if isinstance(part, Text) else 2 if part.time_step else 1 for part in parts]
    pads = [0, config.image_token_id, config.video_token_id]
    ids = [
        part.ids if isinstance(part, Text) else (pads[kind],) * part.tokens
        for part, kind in zip(parts, kinds, strict=True)
    ]
    prompt = torch.tensor([[token for each in ids for token in each]])
    types = torch.tensor([[kind for each, kind in zip(ids, kinds, strict=True) for _ in each]])
    generated = reference.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        mm_token_type_ids=types,
        max_new_tokens=12,
        eos_token_id=None,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **inputs,
    )
    logits = torch.cat(generated.logits)
    best, second = logits.topk(2, dim=-1).values.T
    assert (best - second > CLEAR_MARGIN).all(), "choose another seed: a tie proves nothing"
    assert asked.answer == generated.sequences[0, prompt.shape[1] :].tolist()
    computed = torch.stack(engine.runner.logits["0"]).log_softmax(dim=-1)
    assert float((computed - logits.log_softmax(dim=-1)).abs().max()) < LOGPROB_TOLERANCE
