"""The segments of a live session, cut from plans of short conversations, are together the plan of the whole one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import PromptPlan
from gridsieve.services.generation.live import prompts
from gridsieve.services.generation.live.frames import Frame, FramePair, microseconds
from gridsieve.services.generation.request import live_cuts
from gridsieve.services.generation.request.encoded_media import MediaItem
from gridsieve.services.generation.request.live_cuts import SliceSegment
from gridsieve.services.generation.request.session import Segment, Session
from gridsieve.services.preprocessing.planner import Planner
from gridsieve.services.preprocessing.rpc.messages import conversation_of
from gridsieve.v1 import prompt_pb2
from tests import media

MAX_PIXELS = 112 * 112
PICTURES = tuple(media.picture(112, 112, seed) for seed in range(10))


def message(role: prompt_pb2.Role, *parts: prompt_pb2.Part | str) -> prompt_pb2.Message:
    texts = [prompt_pb2.Part(text=part) if isinstance(part, str) else part for part in parts]
    return prompt_pb2.Message(role=role, parts=texts)


def slices(times_s: Sequence[float]) -> list[FramePair]:
    frames = [Frame(PICTURES[number], microseconds(time_s), time_s) for number, time_s in enumerate(times_s)]
    return [FramePair(*pair) for pair in list(pairwise(frames))[::2]]


class Watched:
    """Adds segments to a session as a call does, and computes nothing."""

    def __init__(self, folder: Path) -> None:
        self.planner = Planner(Checkpoint(folder), None)
        self.ends = {Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|im_end|>")}
        self.session = Session("watched", 2048, 256, 16)
        self.cut: SliceSegment | None = None

    def plan(self, prompt: prompt_pb2.Prompt) -> PromptPlan:
        made = self.planner.plan(conversation_of(prompt))
        made.files.close()
        return made.plan

    def watch(self, before: Any, shown: FramePair | None, piece: FramePair) -> None:
        if shown is None:
            plan = self.plan(prompts.turn_slice(before, piece, MAX_PIXELS)[0])
            cut = live_cuts.turn_slice(plan, item(plan), self.session, self.ends)
        else:
            plan = self.plan(prompts.next_slice(shown, piece, MAX_PIXELS)[0])
            assert self.cut
            cut = live_cuts.next_slice(plan, item(plan), self.session, self.cut)
        self.cut = cut
        assert cut.kept.tolist() == list(range(cut.grid.tokens))
        self.add(cut.segment)

    def ask(self, before: Any, shown: FramePair | None, text: str, said: Sequence[int]) -> None:
        plan = self.plan(prompts.question(before, [shown] if shown else [], [text]))
        self.add(live_cuts.question(plan, self.session, self.ends, transient=False), said)

    def add(self, segment: Segment, said: Sequence[int] = ()) -> None:
        prompt = self.session.begin(segment, 0)
        assert sum(run.length for run in segment.runs) == (0 if segment.embeds is None else segment.embeds.shape[1])
        self.session.end(prompt.tokens + max(0, len(said) - 1), said)


def item(plan: PromptPlan) -> MediaItem:
    return MediaItem(0, None, torch.zeros(1, plan.media[0].grid.tokens, 1), 0, bytes(32))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_omni_moe"], scope="module")
def test_a_session_is_laid_out_like_one_conversation(family_checkpoint: Path) -> None:
    """A slice after a pause, a question, one more after its answer, which ends at its limit, and another slice."""
    times_s = (0.0, 0.5, 1.0, 1.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5)
    watched, shown = Watched(family_checkpoint), None
    opening = [message(prompt_pb2.ROLE_SYSTEM, "Be brief.")]
    first, second, third, fourth, fifth = slices(times_s)
    for piece in (first, second, third):
        watched.watch(opening, shown, piece)
        shown = piece
    tokenizer = Tokenizer.from_file(str(family_checkpoint / "tokenizer.json"))
    answers = [tokenizer.encode(text).ids for text in ("Red.", "a")]
    watched.ask(None, shown, "What moves?", [*answers[0], *watched.ends])
    watched.ask(None, None, "Which one?", answers[1])
    for shown, piece in ((None, fourth), (fourth, fifth)):
        watched.watch(None, shown, piece)
    watched.ask(None, fifth, "And now?", answers[0])

    def video(*pieces: FramePair) -> prompt_pb2.Part:
        frames = [frame for piece in pieces for frame in (piece.first, piece.last)]
        pictures = prompt_pb2.PictureFrames(
            pictures=[frame.picture for frame in frames],
            timestamps_s=[frame.given_s for frame in frames],
            by_time=True,
        )
        sampling = prompt_pb2.FrameSampling(max_pixels=MAX_PIXELS)
        return prompt_pb2.Part(video=prompt_pb2.Media(frames=pictures, frame_sampling=sampling))

    user, model = prompt_pb2.ROLE_USER, prompt_pb2.ROLE_ASSISTANT
    turns = [
        *opening,
        message(user, video(first, second, third), "What moves?"),
        message(model, "Red."),
        message(user, "Which one?"),
        message(model, "a"),
        message(user, video(fourth, fifth), "And now?"),
    ]
    whole, tokens = watched.plan(prompt_pb2.Prompt(messages=turns)), len(answers[0]) - 1
    assert watched.session.ids[: len(watched.session.ids) - tokens].tolist() == whole.input_ids.tolist()
    assert np.array_equal(watched.session.positions[:, : whole.tokens], whole.positions)
    assert watched.session.next_position == whole.positions.max() + 1 + tokens
