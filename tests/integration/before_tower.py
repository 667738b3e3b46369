"""Questions about a video of which tokens are chosen before the tower, and their answers without the services.

whole frames of preprocessing ─▶ choice ─▶ transformers' vision layers ─▶ gathered ─▶ transformers' text model
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gridsieve.client.answer import Answer
from gridsieve.client.messages import generate_request
from gridsieve.client.prompt import Video, user_turn
from gridsieve.common.contract.plan import PromptPlan
from tests.choice import chosen_tokens
from tests.families import FamilyUnderTest, vision_of
from tests.integration.reference import CLEAR_MARGIN, plan_and_frames
from tests.oracle import Item, Text, expected_logprobs, expected_sequence
from tests.vision import kept_embeds, patches_of

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Expected:
    """What the services must make of a question. kept: tokens of the video's grid. embeds: [1 + levels, K, D]."""

    parts: list[Text | Item]
    kept: list[int]
    embeds: NDArray[np.float32]
    pad_id: int

    def check(self, answer: Answer, model: Any) -> None:
        """Compares log-probabilities with one forward of transformers' text model over the gathered sequence."""
        sequence = expected_sequence(self.parts, [self.kept], self.pad_id)
        (item,) = answer.usage.media
        assert (item.num_kept, answer.usage.prompt_tokens) == (len(self.kept), len(sequence.ids))
        items = [part for part in self.parts if isinstance(part, Item)]
        logprobs = expected_logprobs(model.model.language_model, model.lm_head, sequence, items, answer.token_ids)
        best, second = logprobs.topk(2, dim=-1).values.T
        said = torch.tensor(answer.token_ids)
        of_said = logprobs.gather(-1, said[:, None])[:, 0]
        clear = best - second > CLEAR_MARGIN
        assert clear.any(), "choose another clip: ties prove nothing"
        assert (said == logprobs.argmax(dim=-1))[clear].all()
        assert (best - of_said <= CLEAR_MARGIN).all()
        assert float((torch.tensor(answer.logprobs) - of_said).abs().max()) < TOLERANCE


async def expect(
    preprocessing: str, video: Video, question: str, model: Any, family: FamilyUnderTest, folder: Path
) -> Expected:
    """video: with its pruning, by `pixel_change`."""
    plan, frames = await plan_and_frames(preprocessing, generate_request([user_turn([video], question)], {}).prompt)
    (item,) = plan.media
    whole = np.frombuffer(frames[0], np.uint8).reshape(item.frames.count, *item.frames.size_px, 3)
    pruning, grid, step = video.pruning, (item.grid.h, item.grid.w), item.slice_frames
    assert pruning is not None
    kept, levels = [], []
    for number, tokens in enumerate(chosen_tokens(whole, grid, step, pruning.rate or 0, pruning.threshold)):
        if tokens:
            patches = patches_of(whole[number * step : (number + 1) * step], folder, family)
            levels.append(kept_embeds(vision_of(model), patches, grid, tokens, family))
        kept += [number * item.grid.slice_tokens + token for token in tokens]
    embeds = torch.cat(levels, dim=1).numpy()
    full = np.full((len(embeds), item.grid.tokens, embeds.shape[2]), np.nan, np.float32)
    full[:, kept] = embeds
    return Expected(parts_of_plan(plan, full, model.config), kept, embeds, model.config.video_token_id)


def parts_of_plan(plan: PromptPlan, embeds: NDArray[np.float32], config: Any) -> list[Text | Item]:
    """The text and the video of a prompt, from its ids. embeds: of all tokens, NaN of those that nothing may read."""
    (item,) = plan.media
    ids: list[int] = plan.input_ids.tolist()
    texts, end = [], 0
    for run in item.runs:
        texts.append(Text(tuple(ids[end : run.offset])))
        end = run.end
    per_second = getattr(config.vision_config, "tokens_per_second", getattr(config, "position_id_per_seconds", None))
    step = (item.seconds_per_grid or 0) * Fraction(str(per_second)) if per_second else Fraction(1)
    video = Item(
        item.grid.t,
        item.grid.h,
        item.grid.w,
        step,
        embeds[0],
        deepstack=tuple(embeds[1:]),
        texts=(Text(()), *texts[1:], Text(())) if len(texts) > 1 else (),
    )
    return [texts[0], video, Text(tuple(ids[end:]))]
