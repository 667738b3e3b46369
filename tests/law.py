"""The law for tests: random questions, answered step by step and compared with one unchunked forward of transformers'
own text model over the gathered sequence."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from gridsieve.services.generation.sampling.sampler import SamplingParams
from tests.families import FamilyUnderTest, text_and_head
from tests.oracle import Clip, Item, Part, Text, expected_logprobs, expected_sequence, items_of, kept_tokens
from tests.tiny import BLOCK_TOKENS, PAD_ID, Asked, Models, TinyEngine, random_item

LOGPROB_TOLERANCE = 1e-4
CLEAR_MARGIN = 2e-4
# The parts of a prompt, in order: no media, one item, several of different sizes, and media of earlier turns.
MIXES = (
    "text",
    "text image text",
    "text video text",
    "video text",
    "text video",
    "text image text video text",
    "text video image text",
    "text video text video text",
    "text video text image text text video text",
)
# Of models that hear: sounds, and videos with their sound.
MIXES_HEARD = (
    "text sound text",
    "text clip text",
    "text clip",
    "text clip text clip text",
    "text sound text clip text image text",
)


@dataclass(frozen=True)
class Question:
    """A prompt and how it is answered.

    kept_seed: seed of the encoder's choice of tokens where the method is random; equal items get equal choices.
    answers: how many; all but the first are sampled at temperature 1. adapter: name of a loaded adapter. yields: to
    those that do not. attention: whether it asks what the answers attend to.
    """

    parts: tuple[Part, ...]
    new_tokens: int
    kept_seed: int = 0
    answers: int = 1
    adapter: str | None = None
    yields: bool = False
    attention: bool = False

    @property
    def items(self) -> list[Item]:
        return items_of(self.parts)

    @property
    def kept(self) -> list[list[int]]:
        return [kept_tokens(item, self.kept_seed + zlib.crc32(item.embeds.tobytes())) for item in self.items]

    @property
    def prompt_tokens(self) -> int:
        """Length of the pruned prompt, at most."""
        texts = [part for part in self.parts if isinstance(part, Text)]
        texts += [text for item in self.items for text in item.texts]
        around = 2 * sum(isinstance(part, Clip) for part in self.parts)
        return sum(len(text.ids) for text in texts) + around + sum(item.num_kept for item in self.items)

    @property
    def most_blocks(self) -> int:
        """Blocks at the end of the answer, whose last token is never computed."""
        return -(-(self.prompt_tokens + self.new_tokens - 1) // BLOCK_TOKENS)


def text(*, least: int = 1, most: int = 12) -> st.SearchStrategy[Text]:
    ids = st.integers(10, 300) | st.integers(10, 12)  # the few repeat, so that draft tokens are proposed
    return st.lists(ids, min_size=least, max_size=most).map(lambda each: Text(tuple(each)))


@st.composite
def item(draw: st.DrawFn, family: FamilyUnderTest, video: bool) -> Item:
    # 2/3: 1.5 fps; the third: every twelfth frame of 23.976 fps, at two tokens per second.
    steps = (Fraction(1), Fraction(2, 3), Fraction(2 * 12 * 2002, 48000), Fraction(7))
    made = random_item(
        family,
        (draw(st.integers(1, 5)) if video else 1, draw(st.integers(1, 3)), draw(st.integers(1, 4))),
        time_step=draw(st.sampled_from(steps)) if video else None,
        seed=draw(st.integers(0, 2**32 - 1)),
        rate=draw(st.sampled_from((0.0, 0.25, 0.5, 0.75, 0.9))),
        method=draw(st.sampled_from(("evs", "evs_causal", "vidcom2", "vcast", "random", "pixel_change", "none"))),
    )
    return replace(made, bounded=video and draw(st.sampled_from((False, False, True))))


@st.composite
def sound(draw: st.DrawFn, family: FamilyUnderTest) -> Item:
    made = random_item(family, (1, 1, draw(st.integers(1, 12))), None, seed=draw(st.integers(0, 2**32 - 1)))
    return replace(made, linear=True)


@st.composite
def clip(draw: st.DrawFn, family: FamilyUnderTest) -> Clip:
    return Clip(draw(item(family, video=True)), draw(sound(family)), draw(st.sampled_from((1, 2, 5))), 8, 9)


@st.composite
def question(draw: st.DrawFn, family: FamilyUnderTest) -> Question:
    mix = draw(st.sampled_from(MIXES + (MIXES_HEARD if family.hears else ()))).split()
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "text": text(most=30 if mix == ["text"] else 12),
        "image": item(family, video=False),
        "video": item(family, video=True),
        "sound": sound(family),
        "clip": clip(family),
    }
    return Question(tuple(draw(kinds[kind]) for kind in mix), draw(st.integers(1, 14)))


def several_questions(family: FamilyUnderTest) -> list[Question]:
    """Six prompts of several lengths, with pruned videos and pictures; some begin alike."""
    asked = []
    for number in range(6):
        film = random_item(family, (4, 2, 3), Fraction(2, 3), seed=number // 2, rate=0.75)
        picture = random_item(family, (1, 3, 2), None, seed=number)
        opening = Text(tuple(range(10, 15 + 3 * number)))
        parts = (opening, film, Text((7, 8)), picture, Text((9, 10 + number))) if number % 3 else (opening,)
        asked.append(Question(parts, new_tokens=8 + number))
    return asked


def answer(
    engine: TinyEngine,
    questions: Sequence[Question],
    arrivals: Sequence[int] = (),
    deliveries: Sequence[int] = (),
    parts: Sequence[Sequence[int]] = (),
) -> list[Asked]:
    """Submits question i before step arrivals[i] and delivers the n-th media item deliveries[n] steps later.

    parts: of the n-th item a part ends with slice i wherever parts[n][i] is not 0, and the next one comes so many steps
    later; the first part comes when the item would.
    Requests are numbered over all calls for one engine.
    """
    asked: dict[int, Asked] = {}
    due: dict[int, list[tuple[Asked, int, Item, list[int], int]]] = {}
    delays, cuts = list(deliveries), list(parts)
    before = len(engine.runner.logits)
    waiting = [(arrivals[i] if i < len(arrivals) else 0, i) for i in range(len(questions))]
    step = 0
    while waiting or due or any(not each.finished for first in asked.values() for each in (first, *first.others)):
        for each in sorted(waiting):
            when, number = each
            if when > step:
                continue
            waiting.remove(each)
            asking = questions[number]
            params = SamplingParams(asking.new_tokens, attention=asking.attention)
            drawn = [replace(params, temperature=1.0, seed=n) for n in range(1, asking.answers)]
            asked[number] = engine.ask(str(before + number), asking.parts, params, drawn, asking.adapter, asking.yields)
            for index, (media, kept) in enumerate(zip(asking.items, asking.kept, strict=True)):
                at, waits = step + (delays.pop(0) if delays else 0), cuts.pop(0) if cuts else ()
                for slices, wait in zip(range(1, media.t), waits, strict=False):
                    if wait:
                        due.setdefault(at, []).append((asked[number], index, media, kept, slices))
                        at += wait
                due.setdefault(at, []).append((asked[number], index, media, kept, media.t))
        for delivery in due.pop(step, []):
            engine.deliver(*delivery)
        assert engine.engine.step() or not engine.engine.step(), "the engine would sleep although something can run"
        engine.engine.check_integrity()
        assert not any(each.failed for each in asked.values())
        step += 1
        assert step < 5000, "the engine makes no progress"
    return [asked[number] for number in range(len(questions))]


def assert_law(
    models: Models,
    engine: TinyEngine,
    questions: Sequence[Question],
    asked: Sequence[Asked],
    tolerance: float = LOGPROB_TOLERANCE,
    clear_margin: float = CLEAR_MARGIN,
    adapted: Mapping[str, nn.Module] | None = None,
) -> None:
    """Compares log-probabilities and greedy tokens. adapted: for each adapter, the reference text model with it."""
    plain_text, lm_head = text_and_head(models.reference)
    for asking, each in zip(questions, asked, strict=True):
        name = each.request.id
        text_model = (adapted or {})[asking.adapter] if asking.adapter else plain_text
        expected = expected_sequence(asking.parts, asking.kept, PAD_ID)
        assert each.request.prompt.tokens == len(expected.ids)
        assert each.request.cached_tokens < len(expected.ids)
        assert len(each.answer) == asking.new_tokens
        reference = expected_logprobs(text_model, lm_head, expected, asking.items, each.answer, models.family.linear)
        computed = torch.stack(engine.runner.logits[name]).cpu().log_softmax(dim=-1)
        assert computed.shape == reference.shape
        worst = float((computed - reference).abs().max())
        assert worst < tolerance, f"question {name} is {worst} off"
        if not each.request.sampling.greedy:
            continue
        best, second = reference.topk(2, dim=-1).values.T
        clear = best - second > clear_margin
        assert torch.equal(torch.tensor(each.answer)[clear], reference.argmax(dim=-1)[clear])
