"""The stages of the time to first token: each instant belongs to the earliest stage that has not finished."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import monotonic_ns
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.contract import errors
from gridsieve.common.contract.plan import PromptPlan
from gridsieve.services.generation.stage_clock import Stage, StageClock
from gridsieve.services.generation.upstream.media import MediaClient
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.encoder_pb2 import EncodeResponse
from tests.generation.generation_peers import (
    Encoder,
    Preprocessing,
    embeds_messages,
    prompt_message,
    prompt_plan,
    serving,
)
from tests.generation.media_client import FINGERPRINT, MODEL, PLAN

TEXT = prompt_plan(FINGERPRINT, 3)
SECOND = 10**9


def messages() -> list[EncodeResponse]:
    """Five, read at 10, 20, 30, 40 and 50 s. The first begins the video, the fourth the image."""
    video, image = np.zeros((1, 12, 6), np.float32), np.zeros((1, 4, 6), np.float32)
    made = [*embeds_messages(0, video, None, piece_bytes=96), *embeds_messages(1, image, None, piece_bytes=48)]
    # The video left the stages at 2, 3, 5, 7 and 9 s, the image at 4, 5, 10, 20 and 35 s.
    for message, moments_s in ((made[0], (8, 7, 5, 3, 1)), (made[3], (36, 35, 30, 20, 5))):
        ages = message.embeds.ages
        ages.decoded_s, ages.resized_s, ages.begun_s, ages.encoded_s, ages.pruned_s = moments_s
    return made


async def seconds(folder: Path, sent: list[EncodeResponse]) -> Mapping[Stage, int]:
    """Durations of the stages, without zeros; prefill begins at 55 s, the first token arrives at 60 s."""
    now_s = 0
    clock = StageClock(lambda: now_s * SECOND)
    async with serving(f"unix:{folder}/peers", Encoder(PLAN, sent)) as channel:
        client = MediaClient(channel, channel, MODEL, ByteSemaphore(2**16))
        async with client.open(prompt_message(PLAN), prompt_pb2.Pruning(), clock) as session:
            read = session._upstream.read

            async def counted() -> Any:
                nonlocal now_s
                message = await read()
                now_s += 10
                return message

            session._upstream.read = counted  # type: ignore[method-assign]
            async for _ in session.receive(range(2)):
                pass
    clock.finish(Stage.WAIT_FOR_PREFILL, 55 * SECOND)
    clock.token(60 * SECOND)
    stages_ns = clock.stages_ns()
    assert sum(stages_ns.values()) == clock.first_token_ns == 60 * SECOND
    return {stage: took_ns // SECOND for stage, took_ns in stages_ns.items() if took_ns}


async def test_a_stage_ends_when_the_last_item_has_left_it(tmp_path: Path) -> None:
    assert await seconds(tmp_path, messages()) == {
        Stage.DECODE: 4,
        Stage.RESIZE: 1,
        Stage.WAIT_FOR_ENCODER: 5,
        Stage.ENCODE: 10,
        Stage.PRUNE: 15,
        Stage.TRANSFER: 15,
        Stage.WAIT_FOR_PREFILL: 5,
        Stage.PREFILL: 5,
    }


async def test_work_of_an_earlier_request_takes_no_time(tmp_path: Path) -> None:
    """Both come from the encoder's cache, where they are pruned. The prompt had brought the embeddings of the image."""
    sent = messages()
    for message in (sent[0], sent[3]):
        ages = message.embeds.ages
        ages.decoded_s = ages.resized_s = ages.encoded_s = 1e6
    ages.ClearField("decoded_s")
    ages.ClearField("resized_s")
    assert await seconds(tmp_path, sent) == {
        Stage.WAIT_FOR_ENCODER: 10,
        Stage.PRUNE: 25,
        Stage.TRANSFER: 15,
        Stage.WAIT_FOR_PREFILL: 5,
        Stage.PREFILL: 5,
    }


async def test_ages_in_an_impossible_order_keep_the_sum(tmp_path: Path) -> None:
    sent = messages()
    ages = sent[3].embeds.ages
    ages.decoded_s, ages.resized_s, ages.begun_s, ages.encoded_s, ages.pruned_s = 0, 10, 20, 30, 1e300
    took = await seconds(tmp_path, sent)
    assert took == {Stage.DECODE: 40, Stage.TRANSFER: 10, Stage.WAIT_FOR_PREFILL: 5, Stage.PREFILL: 5}


@pytest.mark.parametrize("wrong_s", [-1e-9, float("nan"), float("inf")])
async def test_an_impossible_age_is_a_violation(tmp_path: Path, wrong_s: float) -> None:
    sent = messages()
    sent[3].embeds.ages.pruned_s = wrong_s
    with pytest.raises(errors.PeerContract, match="an age must be"):
        await seconds(tmp_path, sent)


@pytest.mark.parametrize("plan", [PLAN, TEXT], ids=["from the encoder", "from preprocessing"])
async def test_the_plan_reports_when_media_were_fetched(tmp_path: Path, plan: PromptPlan) -> None:
    async def stages(fetched_ago_s: float | None) -> Mapping[Stage, int]:
        """Stages of a request that began a second ago, longer than anything here takes."""
        began_ns = iter([monotonic_ns() - SECOND])
        clock = StageClock(lambda: next(began_ns, None) or monotonic_ns())
        peers = Encoder(plan, fetched_ago_s=fetched_ago_s), Preprocessing(plan, fetched_ago_s)
        async with serving(f"unix:{tmp_path}/peers", *peers) as channel:
            client = MediaClient(channel, channel, MODEL, ByteSemaphore(2**16))
            async with client.open(prompt_message(plan), prompt_pb2.Pruning(), clock):
                clock.token(clock.now_ns())
        return clock.stages_ns()

    for nothing_to_fetch in (None, 1000.0):
        took = await stages(nothing_to_fetch)
        assert took[Stage.FETCH] == 0 < took[Stage.PLAN]
    just_now = await stages(0.0)
    assert just_now[Stage.FETCH] > just_now[Stage.PLAN] > 0
    with pytest.raises(errors.PeerContract, match="an age must be"):
        await stages(-1.0)


marks = st.dictionaries(st.sampled_from([stage for stage in Stage if stage is not Stage.PREFILL]), st.integers(0, 50))


def owner(instant: int, finished: dict[Stage, int]) -> Stage:
    """The earliest stage unfinished at an instant; finishing a stage finishes all earlier ones."""
    return next(
        stage
        for stage in Stage
        if all(finished.get(later, 1000) > instant for later in Stage if later >= stage) or stage is Stage.PREFILL
    )


@settings(max_examples=60)
@given(start=st.integers(0, 9), marks=marks, first_token=st.integers(0, 60))
def test_stages_sum_to_the_time_to_first_token_and_own_their_instants(
    start: int, marks: dict[Stage, int], first_token: int
) -> None:
    # Events are recorded in the order of time.
    finished = {stage: start + after for stage, after in marks.items() if after <= first_token}
    clock = StageClock(lambda: start)
    for stage, at_ns in sorted(finished.items(), key=lambda note: note[1]):
        clock.finish(stage, at_ns)
    clock.token(start + first_token)
    durations = clock.stages_ns()
    assert sum(durations.values()) == first_token == clock.first_token_ns
    instants = [owner(instant, finished) for instant in range(start, start + first_token)]
    assert durations == {stage: instants.count(stage) for stage in Stage}


def test_tokens_after_the_first_count_as_generation() -> None:
    clock = StageClock(lambda: 100)
    assert [clock.token(at_ns) for at_ns in (110, 120, 150)] == [True, False, False]
    assert (clock.first_token_ns, clock.generate_ns) == (10, 40)
