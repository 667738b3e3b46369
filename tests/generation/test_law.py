"""The law: for any mix of media, pruning, chunks, neighbours, preemption, prefix hits, siblings and draft tokens, the
log-probabilities are those of one unchunked forward of transformers' own text model over the gathered sequence."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from gridsieve.services.generation.engine.payoff import Payoff
from gridsieve.services.generation.sampling.sampler import SamplingParams
from tests.law import Question, answer, assert_law, item, question, sound, text
from tests.oracle import Clip, Item, Text
from tests.tiny import BLOCK_TOKENS, Models, TinyEngine, load_models, random_item

# The two with most parts: recurrent states; three axes, text between slices, and levels that are added to rows.
MOST = pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl"], scope="module")
# Heads of which a half is rotated in pairs, one-dimensional positions without and with text between slices, stored
# vectors between rows, whole grids, and experts.
OTHERS = ("glm4v", "internvl", "llava", "llava_onevision", "qwen2_vl", "qwen2_5_omni", "qwen2_5_vl", "qwen3_vl_moe")
LAW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.fixture(scope="module")
def models(family: str, tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    return load_models(family, tmp_path_factory.mktemp(family))


@LAW
@given(st.data())
@MOST
def test_the_law_holds_for_any_mix(models: Models, data: st.DataObject) -> None:
    assert_law_of_any_mix(models, data)


@settings(LAW, max_examples=5)
@given(st.data())
@pytest.mark.parametrize("family", OTHERS, scope="module")
def test_the_law_holds_for_some_mixes_of_other_families(models: Models, data: st.DataObject) -> None:
    assert_law_of_any_mix(models, data)


@pytest.mark.deep
@pytest.mark.timeout(3600)
@settings(LAW, max_examples=300)
@given(st.data())
def test_the_law_holds_for_many_mixes(models: Models, data: st.DataObject) -> None:
    assert_law_of_any_mix(models, data)


def assert_law_of_any_mix(models: Models, data: st.DataObject, payoff: Payoff | None = None) -> None:
    """Questions, half of which begin like an earlier one, in a cache that may be too small for all of them."""
    questions = [data.draw(question(models.family))]
    for _ in range(data.draw(st.integers(1, 3))):
        fresh = data.draw(question(models.family))
        asking = begins_like(data, models, data.draw(st.sampled_from(questions))) if data.draw(st.booleans()) else fresh
        answers, yields = data.draw(st.sampled_from((1, 1, 1, 2, 3))), data.draw(st.booleans())
        questions.append(replace(asking, answers=answers, yields=yields))
    engine = TinyEngine(
        models.engine,
        blocks=max(each.most_blocks for each in questions) + data.draw(st.sampled_from((0, 0, 1, 2, 4, 16))),
        max_num_batched_tokens=data.draw(st.sampled_from((2, 3, 5, 8, 16, 64, 512))),
        max_num_seqs=data.draw(st.integers(1, 5)),
        max_draft_tokens=data.draw(st.sampled_from((0, 1, 3, 5))),
        overlap=data.draw(st.booleans()),
        payoff=payoff,
        snapshots=data.draw(st.sampled_from((0, 1, 4, 16))),
    )
    arrivals = data.draw(st.lists(st.sampled_from((0, 0, 1, 3, 8, 20)), min_size=len(questions), max_size=4))
    deliveries = data.draw(st.lists(st.integers(0, 20), max_size=10))
    waits = st.lists(st.sampled_from((0, 0, 1, 2, 6)), max_size=4)
    firsts = answer(engine, questions, arrivals, deliveries, data.draw(st.lists(waits, max_size=10)))
    asked = [each for first in firsts for each in (first, *first.others)]
    stats, totals = engine.engine.stats(), engine.totals
    event(f"prefix hit: {any(each.request.cached_tokens for each in asked)}")
    event(f"media not sent again: {any(each.spared for each in asked)}")
    event(f"media prefilled before they were complete: {engine.runner.early}")
    event(f"preempted: {totals['preemptions'] > 0}")
    event(f"blocks reclaimed: {any(each.request.holding.reclaimed for each in asked)}")
    event(f"draft tokens: {totals['draft_tokens'] > 0}, accepted: {totals['accepted_draft_tokens'] > 0}")
    assert_law(models, engine, [asking for asking in questions for _ in range(asking.answers)], asked)
    assert (stats.blocks_used, stats.states_used) == (0, 0)


def begins_like(data: st.DataObject, models: Models, other: Question) -> Question:
    """A question with the first parts of another, of which the last item may be pruned otherwise or be another item."""
    parts = list(other.parts[: data.draw(st.integers(1, len(other.parts)))])
    if isinstance(parts[-1], Clip) and data.draw(st.booleans()):
        parts[-1] = replace(parts[-1], sound=data.draw(sound(models.family)))
    elif isinstance(parts[-1], Item) and data.draw(st.booleans()):
        parts[-1] = data.draw(
            st.one_of(st.just(replace(parts[-1], rate=0.5)), item(models.family, video=bool(parts[-1].time_step)))
        )
    return Question((*parts, data.draw(text())), data.draw(st.integers(1, 12)))


@pytest.mark.parametrize("family", ["qwen2_5_omni"], scope="module")
def test_of_a_clip_with_another_sound_only_what_comes_before_it_is_in_the_cache(models: Models) -> None:
    """Its first pictures are, but not those after the first seconds of sound, although the video is the same."""
    video = random_item(models.family, (4, 2, 2), Fraction(3), rate=0.25, method="random")
    heard = [replace(random_item(models.family, (1, 1, 14), None, seed=seed), linear=True) for seed in (1, 2)]
    questions = [
        Question((Text(tuple(range(10, 19))), Clip(video, sound, 5, 8, 9), Text((20 + number, 21))), 3)
        for number, sound in enumerate((heard[0], heard[1], heard[0]))
    ]
    engine = TinyEngine(models.engine)
    asked = [each for question in questions for each in answer(engine, [question])]
    assert [each.spared for each in asked] == [(), (), (0, 1)]
    # The text, the token around the clip, and the pictures before the first sound.
    before = 10 + sum(token < 8 for token in questions[0].kept[0])
    assert asked[1].request.cached_tokens == before // BLOCK_TOKENS * BLOCK_TOKENS
    assert asked[2].request.cached_tokens > before
    assert_law(models, engine, questions, asked)


@pytest.mark.parametrize("family", ["llava_onevision", "qwen3_5", "qwen3_vl"], scope="module")
def test_a_prompt_cut_anywhere_obeys_the_law(models: Models) -> None:
    """Text, a video of which whole slices are dropped, text, an image, text: the first cut is at each place in turn."""
    video = random_item(models.family, (4, 2, 3), Fraction(1), rate=0.75, method="random")
    picture = random_item(models.family, (1, 2, 2), None, seed=6)
    asked = [
        Question((Text((30, 31)), video, Text((32,)), picture, Text((33, 34))), 2, kept_seed=seed) for seed in range(9)
    ]
    questions = [next(each for each in asked if {token // 6 for token in each.kept[0]} < set(range(4)))]
    for cut in range(1, questions[0].prompt_tokens + 1):
        engine = TinyEngine(models.engine, max_num_batched_tokens=cut)
        answers = answer(engine, questions)
        assert engine.runner.steps[0] == [("0", 0, cut)]
        assert_law(models, engine, questions, answers)


@pytest.mark.deep
@pytest.mark.parametrize(
    "family",
    ["cosmos3_edge", "glm4v", "nemotron_h_omni", "nemotron_nano_vl", "qwen3_5", "qwen3_vl"],
    scope="module",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own code
def test_a_compiled_model_obeys_the_law(models: Models) -> None:
    engine = TinyEngine(models.engine, max_num_batched_tokens=11)
    assert engine.runner.compile()
    video = random_item(models.family, (4, 2, 3), Fraction(1), rate=0.5)
    picture = random_item(models.family, (1, 2, 2), None, seed=6)
    mixed = Question((Text((30, 31)), video, Text((32,)), picture, Text((33, 34))), 6, kept_seed=1)
    questions = [mixed, Question((Text(tuple(range(10, 40))),), 9), Question((Text((7,)),), 3)]
    assert_law(models, engine, questions, answer(engine, questions, arrivals=(0, 2, 6)))


@MOST
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


@pytest.mark.parametrize("family", ["qwen2_5_vl"], scope="module")
def test_the_last_row_of_a_prompt_that_ends_with_a_video_waits_until_it_is_known(models: Models) -> None:
    """All later slices keep nothing, so the last row has arrived before it is known to be the last."""
    video = replace(random_item(models.family, (3, 2, 2), Fraction(1), rate=0.5, method="evs_causal"), bounded=True)
    opening, kept = Text(tuple(range(10, 10 + 3 * BLOCK_TOKENS))), list(range(BLOCK_TOKENS))
    engine = TinyEngine(models.engine)
    asked = engine.ask("0", [opening, video], SamplingParams(3))
    engine.deliver(asked, 0, video, kept, slices=1)
    engine.drain()
    engine.deliver(asked, 0, video, kept)
    engine.drain()
    expected = TinyEngine(models.engine)
    whole = expected.ask("0", [opening, video], SamplingParams(3))
    expected.deliver(whole, 0, video, kept)
    expected.drain()
    assert asked.answer == whole.answer != []


# --- what is computed again, and what is reused, by the family with the most parts -----------------------------------

SHARED = pytest.mark.parametrize("family", ["qwen3_vl"], scope="module")
OPENING = Text((20, 21, 22))


def about(video: Item, *ids: int, new_tokens: int = 5) -> Question:
    return Question((OPENING, video, Text(ids)), new_tokens)


# The last row of the picture is in no full block: it is computed from what is kept of the embeddings.
@pytest.mark.parametrize(
    ("sides", "step", "ids"), [((3, 2, 3), Fraction(1), (50,)), ((1, 2, 3), None, tuple(range(60, 80)))]
)
@SHARED
def test_a_second_question_about_media_computes_only_its_own_text(
    models: Models, sides: tuple[int, int, int], step: Fraction | None, ids: tuple[int, ...]
) -> None:
    media = random_item(models.family, sides, step, rate=0.5)
    questions = [about(media, 30, 31), about(media, *ids)]
    engine = TinyEngine(models.engine)
    asked = answer(engine, questions, arrivals=[0, 20])
    cached = (questions[1].prompt_tokens - len(ids)) // BLOCK_TOKENS * BLOCK_TOKENS
    assert asked[1].spared == (0,)
    assert asked[1].request.cached_tokens == cached
    computed = [chunk for step in engine.runner.steps for chunk in step if chunk[0] == "1"]
    assert computed[0] == ("1", cached, questions[1].prompt_tokens)
    assert_law(models, engine, questions, asked)


@SHARED
def test_media_encoded_again_to_the_same_bits_hit_the_blocks_that_are_left(models: Models) -> None:
    video = random_item(models.family, (4, 2, 2), Fraction(1), method="none")
    once = about(video, 30, 31)
    engine = TinyEngine(models.engine, blocks=once.most_blocks)
    answer(engine, [once])
    left_blocks = 3
    filler = Text(tuple(range(100, 100 + BLOCK_TOKENS * (once.most_blocks - left_blocks))))
    answer(engine, [Question((filler,), 1)])
    asked = answer(engine, [once])
    assert asked[0].spared == ()
    assert asked[0].request.cached_tokens == left_blocks * BLOCK_TOKENS
    assert_law(models, engine, [once], asked)


@SHARED
def test_media_are_sent_again_if_pinning_their_blocks_could_starve_a_large_request(models: Models) -> None:
    video = random_item(models.family, (4, 2, 2), Fraction(1), method="none")
    first, second = about(video, 30, new_tokens=1), about(video, 31)
    large = Question((Text(tuple(range(100, 110))),), BLOCK_TOKENS * first.most_blocks - 8)
    engine = TinyEngine(models.engine, blocks=first.most_blocks + 1)
    answer(engine, [first])
    asked = answer(engine, [large, second])
    assert asked[1].spared == ()
    assert_law(models, engine, [large, second], asked)
