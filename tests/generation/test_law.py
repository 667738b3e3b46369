"""The law: for any mix of media, pruning, chunks, neighbours, preemption, prefix hits, siblings and draft tokens, the
log-probabilities are those of one unchunked forward of transformers' own text model over the gathered sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from services.generation.sampling.sampler import SamplingParams
from tests.law import CLEAR_MARGIN, LOGPROB_TOLERANCE, Question, answer, assert_law, item, question, text
from tests.oracle import Item, Text, expected_sequence
from tests.tiny import BLOCK_TOKENS, PAD_ID, Models, TinyEngine, load_models, random_item

LAW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.fixture(scope="module")
def models(family: str, tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    return load_models(family, tmp_path_factory.mktemp(family))


@LAW
@given(st.data())
def test_the_law_holds_for_any_mix(models: Models, data: st.DataObject) -> None:
    assert_law_of_any_mix(models, data)


@pytest.mark.deep
@settings(LAW, max_examples=400)
@given(st.data())
def test_the_law_holds_for_many_mixes(models: Models, data: st.DataObject) -> None:
    assert_law_of_any_mix(models, data)


def assert_law_of_any_mix(models: Models, data: st.DataObject) -> None:
    """Questions, half of which begin like an earlier one, in a cache that may be too small for all of them."""
    questions = [data.draw(question(models.family))]
    for _ in range(data.draw(st.integers(1, 3))):
        fresh = data.draw(question(models.family))
        asking = begins_like(data, models, data.draw(st.sampled_from(questions))) if data.draw(st.booleans()) else fresh
        questions.append(replace(asking, answers=data.draw(st.sampled_from((1, 1, 1, 2, 3)))))
    engine = TinyEngine(
        models.engine,
        blocks=max(each.most_blocks for each in questions) + data.draw(st.sampled_from((0, 0, 1, 2, 4, 16))),
        max_num_batched_tokens=data.draw(st.sampled_from((2, 3, 5, 8, 16, 64, 512))),
        max_num_seqs=data.draw(st.integers(1, 5)),
        max_draft_tokens=data.draw(st.sampled_from((0, 1, 3, 5))),
    )
    arrivals = data.draw(st.lists(st.sampled_from((0, 0, 1, 3, 8, 20)), min_size=len(questions), max_size=4))
    deliveries = data.draw(st.lists(st.integers(0, 20), max_size=10))
    firsts = answer(engine, questions, arrivals, deliveries)
    asked = [each for first in firsts for each in (first, *first.others)]
    stats = engine.engine.stats()
    event(f"prefix hit: {any(each.request.cached_tokens for each in asked)}")
    event(f"media not sent again: {any(each.spared for each in asked)}")
    event(f"preempted: {stats.totals.preemptions > 0}")
    event(f"blocks reclaimed: {any(each.request.reclaimed for each in asked)}")
    event(f"draft tokens: {stats.totals.draft_tokens > 0}, accepted: {stats.totals.accepted_draft_tokens > 0}")
    assert_law(models, engine, [asking for asking in questions for _ in range(asking.answers)], asked)
    assert stats.blocks_used == 0


def begins_like(data: st.DataObject, models: Models, other: Question) -> Question:
    """A question with the first parts of another, of which the last item may be pruned otherwise or be another item."""
    parts = list(other.parts[: data.draw(st.integers(1, len(other.parts)))])
    if isinstance(parts[-1], Item) and data.draw(st.booleans()):
        parts[-1] = data.draw(
            st.one_of(st.just(replace(parts[-1], rate=0.5)), item(models.family, video=bool(parts[-1].time_step)))
        )
    return Question((*parts, data.draw(text())), data.draw(st.integers(1, 12)))


def test_a_prompt_cut_anywhere_obeys_the_law(models: Models) -> None:
    """Text, a video of which whole slices are dropped, text, an image, text: the first cut is at each place in turn."""
    video = random_item(models.family, (4, 2, 3), Fraction(1), rate=0.75, method="random")
    picture = random_item(models.family, (1, 2, 2), None, seed=6)
    questions = [Question((Text((30, 31)), video, Text((32,)), picture, Text((33, 34))), 2, kept_seed=1)]
    assert {token // 6 for token in questions[0].kept[0]} < set(range(4))
    for cut in range(1, questions[0].prompt_tokens + 1):
        engine = TinyEngine(models.engine, max_num_batched_tokens=cut)
        asked = answer(engine, questions)
        assert engine.runner.steps[0] == [("0", 0, cut)]
        assert_law(models, engine, questions, asked)


def test_twenty_images_delivered_in_reverse_obey_the_law(models: Models) -> None:
    parts: list[Text | Item] = []
    for number in range(20):
        picture = random_item(models.family, (1, 1 + number % 3, 1 + number % 4), None, seed=number)
        parts += [Text((20 + number,)), picture]
    questions = [Question((*parts, Text((5, 6, 7))), 4)]
    engine = TinyEngine(models.engine, max_num_batched_tokens=7)
    assert_law(models, engine, questions, answer(engine, questions, deliveries=range(19, -1, -1)))


def test_several_answers_share_one_prefill(models: Models) -> None:
    video = random_item(models.family, (3, 2, 3), Fraction(1), rate=0.25)
    asking = Question((Text((20, 21, 22)), video, Text((30, 31, 32))), 5)
    engine = TinyEngine(models.engine, max_num_batched_tokens=5)
    sampled = [SamplingParams(5, temperature=1.0, seed=seed) for seed in (1, 2)]
    asked = engine.ask("0", asking.parts, SamplingParams(5), [*sampled, SamplingParams(5)])
    engine.deliver(asked, 0, video, asking.kept[0])
    engine.drain()
    engine.engine.check_integrity()
    assert asked.others[2].answer == asked.answer
    assert asked.others[0].answer != asked.others[1].answer
    assert_law(models, engine, [asking] * 4, [asked, *asked.others])
    computed = [end - start for step in engine.runner.steps for name, start, end in step if name != "0"]
    rest = asking.prompt_tokens % BLOCK_TOKENS or BLOCK_TOKENS
    assert sum(computed) == 3 * (rest + 4)  # the last token of an answer is never computed
    assert engine.engine.stats().blocks_used == 0


@pytest.mark.parametrize(
    ("grids", "max_num_batched_tokens"),
    [([("image", 1, 3, 2), ("video", 4, 4, 4)], 16), ([("video", 2, 2, 3), ("image", 1, 2, 2)], 5)],
)
def test_at_rate_0_answers_are_those_of_transformers_generate(
    models: Models, grids: list[tuple[str, int, int, int]], max_num_batched_tokens: int
) -> None:
    """The whole model with pixels. Where the slices of a video form one grid, t stays within max(h, w): only there do
    the positions of transformers equal those of the formula."""
    parts: list[Text | Item] = [Text((300, 301))]
    inputs: dict[str, torch.Tensor] = {}
    for seed, (kind, *sides) in enumerate(grids):
        seen, pixels = encoded(models, kind == "video", sides, seed)
        parts += [seen, Text((302, 303, 304))]
        inputs |= pixels
    asking = Question(tuple(parts), 12)
    engine = TinyEngine(models.engine, max_num_batched_tokens=max_num_batched_tokens)
    asked = answer(engine, [asking])[0]
    prompt, kinds = prompt_of_transformers(models, asking)
    generated = models.reference.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        mm_token_type_ids=kinds,
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


def encoded(models: Models, video: bool, sides: Sequence[int], seed: int) -> tuple[Item, dict[str, torch.Tensor]]:
    """An item of random pixels as encoded by transformers' own tower, and the arguments of `generate` for it."""
    family, reference = models.family, models.reference
    t, h, w = sides
    values = 3 * family.temporal_patch * family.patch_px**2
    pixels = torch.randn(t * h * w * family.merge**2, values, generator=torch.Generator().manual_seed(seed))
    grid = torch.tensor([[t, family.merge * h, family.merge * w]])
    with torch.no_grad():
        features = (reference.get_video_features if video else reference.get_image_features)(pixels, grid)
    levels = [features.pooler_output[0].numpy()]
    if family.levels:
        levels += [level[0].numpy() for level in features.deepstack_features]
    assert len(levels) == 1 + family.levels
    step = Fraction(1) if video else None
    texts = timestamps(models.folder, t) if video and family.slices_stand_alone else ()
    seen = Item(t, h, w, step, levels[0], deepstack=tuple(levels[1:]), texts=texts)
    if not video:
        return seen, {"pixel_values": pixels, "image_grid_thw": grid}
    inputs = {"pixel_values_videos": pixels, "video_grid_thw": grid}
    return seen, inputs if texts else inputs | {"second_per_grid_ts": torch.tensor([0.5])}


def timestamps(folder: Path, slices: int) -> tuple[Text, ...]:
    """The text that transformers' Qwen3VLProcessor puts around the slices of a video of two frames per second."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    opening = [f"<{i + 0.25:.1f} seconds><|vision_start|>" for i in range(slices)]
    texts = [opening[0], *("<|vision_end|>" + each for each in opening[1:]), "<|vision_end|>"]
    return tuple(Text(tuple(tokenizer(each).input_ids)) for each in texts)


def prompt_of_transformers(models: Models, asking: Question) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and mm_token_type_ids, 1 for an image and 2 for a video: int64 [1, N] each."""
    config = models.reference.config
    pads = [0, config.image_token_id, config.video_token_id]
    full = expected_sequence(asking.parts, [range(item.tokens) for item in asking.items], PAD_ID)
    kinds = [0 if source is None else 2 if asking.items[source[0]].time_step else 1 for source in full.rows]
    ids = [pads[kind] or token_id for kind, token_id in zip(kinds, full.ids, strict=True)]
    return torch.tensor([ids]), torch.tensor([kinds])
