"""The law: whatever is chunked, batched, pruned, preempted or late, the log-probabilities are those of one unchunked
forward of transformers' own text model over the gathered sequence."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.law import CLEAR_MARGIN, LOGPROB_TOLERANCE, Question, answer, assert_law, question
from tests.oracle import Item, Text, expected_sequence
from tests.tiny import BLOCK_TOKENS, PAD_ID, Models, TinyEngine, load_models, random_item


@pytest.fixture(scope="module")
def models(family: str, tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    return load_models(family, tmp_path_factory.mktemp(family))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_log_probabilities_do_not_depend_on_chunks_neighbours_lateness_or_preemption(
    models: Models, data: st.DataObject
) -> None:
    questions = data.draw(st.lists(question(models.family), min_size=2, max_size=5))
    least_blocks = max(each.most_blocks for each in questions)
    engine = TinyEngine(
        models.engine,
        blocks=least_blocks + data.draw(st.sampled_from((0, 1, 2, 4, 16))),
        max_num_batched_tokens=data.draw(st.sampled_from((1, 2, 3, 5, 8, 16, 64, 512))),
        max_num_seqs=data.draw(st.integers(1, 4)),
    )
    arrivals = data.draw(st.lists(st.integers(0, 8), max_size=5))
    deliveries = data.draw(st.lists(st.integers(0, 20), max_size=10))
    asked = answer(engine, questions, arrivals, deliveries)
    event(f"preempted: {engine.engine.stats().totals.preemptions > 0}")
    event(f"reclaimed: {any(each.request.reclaimed for each in asked)}")
    assert_law(models, engine, questions, asked)
    assert engine.engine.stats().blocks_used == 0


@pytest.mark.parametrize("max_num_batched_tokens", [1, 7, 512])
def test_twenty_images_in_one_prompt_obey_the_law(models: Models, max_num_batched_tokens: int) -> None:
    parts: list[Text | Item] = []
    for number in range(20):
        parts += [
            Text((20 + number,)),
            random_item(models.family, (1, 1 + number % 3, 1 + number % 4), None, seed=number),
        ]
    questions = [Question((*parts, Text((5, 6, 7))), 4)]
    engine = TinyEngine(models.engine, max_num_batched_tokens=max_num_batched_tokens)
    assert_law(models, engine, questions, answer(engine, questions, deliveries=range(19, -1, -1)))


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


def test_preempted_answers_obey_the_law(models: Models) -> None:
    """Two of three questions fit together until their answers have grown."""
    video = random_item(models.family, (4, 2, 2), Fraction(1), rate=0.5)
    questions = [Question((Text((30 + i, 31, 32)), video, Text((40, 41))), 16) for i in range(3)]
    engine = TinyEngine(models.engine, blocks=2 * questions[0].most_blocks - 1, max_num_batched_tokens=64)
    asked = answer(engine, questions)
    assert engine.engine.stats().totals.preemptions > 0
    assert_law(models, engine, questions, asked)


def test_late_media_and_reclaimed_blocks_obey_the_law(models: Models) -> None:
    """The text before a video is prefilled, loses its blocks to another question, and is prefilled again in the end."""
    video = random_item(models.family, (2, 2, 2), Fraction(1), method="none")
    late = Question((Text(tuple(range(10, 26))), video, Text((7,))), 3)
    whole_cache = Question((Text(tuple(range(100, 96 + BLOCK_TOKENS * late.most_blocks))),), 5)
    questions = [late, whole_cache]
    engine = TinyEngine(models.engine, blocks=late.most_blocks, max_num_batched_tokens=64)
    asked = answer(engine, questions, arrivals=[0, 2], deliveries=[6])
    early = [window for step in engine.runner.steps for window in step if window[0] == "0"]
    before_media = 16 + len(video.texts[0].ids if video.texts else ())
    assert early[:2] == [("0", 0, before_media), ("0", 0, late.prompt_tokens)]
    assert_law(models, engine, questions, asked)


@pytest.mark.parametrize(
    ("grids", "max_num_batched_tokens"),
    [
        ([("image", 1, 2, 3)], 512),
        ([("video", 3, 2, 4)], 5),
        ([("image", 1, 3, 2), ("video", 4, 4, 4)], 16),
        ([("video", 2, 2, 3), ("image", 1, 2, 2)], 1),
    ],
)
def test_at_rate_0_answers_are_those_of_transformers_generate(
    models: Models, grids: list[tuple[str, int, int, int]], max_num_batched_tokens: int
) -> None:
    """The whole model with pixels. Where slices make one grid, t stays within max(h, w): there its positions are the
    formula's."""
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
    """An item of random pixels as transformers' own tower sees it, and what `generate` takes of it."""
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
    """What transformers' Qwen3VLProcessor writes around the slices of a video of two frames a second."""
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
