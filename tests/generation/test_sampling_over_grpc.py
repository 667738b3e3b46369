"""Sampling parameters over gRPC: their ranges, and their effect on the responses."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc

from framesieve.v1 import generation_pb2
from framesieve.v1.generation_pb2 import Sampling
from services.generation.sampling.detokenizer import load_tokenizer
from tests.generation.generation_peers import eventually
from tests.generation.generation_service import answers, refused, service_of, token_ids

DRAWN = Sampling(max_new_tokens=20, temperature=1.0, seed=3)


def but(sampling: Sampling, **fields: Any) -> Sampling:
    """A copy with some fields changed."""
    changed = Sampling()
    changed.CopyFrom(sampling)
    changed.MergeFrom(Sampling(**fields))
    return changed


REFUSED = [
    (Sampling(temperature=-1), "sampling.temperature must be between 0 and 100, got -1.0"),
    (Sampling(max_new_tokens=0), "sampling.max_new_tokens must be at least 1, got 0"),
    (Sampling(min_p=2), "sampling.min_p must be between 0 and 1, got 2.0"),
    (Sampling(repetition_penalty=0), "sampling.repetition_penalty must be above 0 and at most 100, got 0.0"),
    (Sampling(presence_penalty=3), "sampling.presence_penalty must be between -2 and 2, got 3.0"),
    (Sampling(frequency_penalty=-3), "sampling.frequency_penalty must be between -2 and 2, got -3.0"),
    (Sampling(logprobs=True, top_logprobs=21), "sampling.top_logprobs must be between 0 and 20, got 21"),
    (Sampling(top_logprobs=1), "sampling.top_logprobs must be 0 without logprobs, got 1"),
    (Sampling(stop_token_ids=[1] * 65), "sampling.stop_token_ids must be at most 64 tokens, got 65 tokens"),
    (Sampling(n=17), "sampling.n must be between 1 and 16, got 17"),
]


async def test_invalid_values_and_unknown_adapters_are_refused_before_any_upstream_call(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:
        for sampling, message in REFUSED:
            refusal = await refused(service.ask(sampling=sampling))
            assert refusal == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", message)
        for name in ("traffic", ""):
            message = f"adapter must be unset, as none is loaded (--adapters), got {name!r}"
            refusal = await refused(service.ask(adapter=name))
            assert refusal == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", message)
        assert service.encoder.metadata == []
        _, reason, message = await refused(service.ask(sampling=Sampling(stop_token_ids=[10**6])))
        assert reason == "INVALID_REQUEST"
        assert message.startswith("sampling.stop_token_ids[0] must be at least 0 and below ")
        assert message.endswith(", got 1000000")
        await eventually(service.idle)


async def test_the_same_seed_gives_the_same_answer_beside_others(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:

        async def answer(seed: int | None) -> list[int]:
            sampling = Sampling(max_new_tokens=20, temperature=1.0, seed=seed)
            return token_ids(await answers(service.ask(sampling=sampling)))

        alone = await answer(7)
        together = await asyncio.gather(answer(7), answer(8), answer(None))
    assert together[0] == alone
    assert together[1] != alone


async def test_an_answer_ends_before_its_stop_string(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:

        async def text(*stop: str) -> tuple[str, int]:
            sampling = Sampling(max_new_tokens=40, temperature=1.0, seed=3, stop=stop)
            responses = await answers(service.ask_text(sampling=sampling))
            return "".join(each.delta.text for each in responses), responses[-1].finished.reason

        whole, reason = await text()
        assert reason == generation_pb2.FINISH_REASON_LENGTH
        stop = whole[len(whole) // 2 :][:3]
        assert await text(stop) == (whole[: whole.find(stop)], generation_pb2.FINISH_REASON_STOP)


async def test_an_answer_ends_with_its_stop_token_whose_text_is_hidden(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:
        whole = await answers(service.ask_text(sampling=DRAWN))
        tokens = token_ids(whole)
        ended = tokens[10]
        first = tokens.index(ended)
        responses = await answers(service.ask_text(sampling=but(DRAWN, stop_token_ids=[0, ended])))
        assert 0 not in tokens
        assert token_ids(responses) == tokens[: first + 1]
        assert responses[-1].finished.reason == generation_pb2.FINISH_REASON_STOP
        assert responses[-1].finished.usage.completion_tokens == first + 1
        text = "".join(response.delta.text for response in responses)
        assert text == load_tokenizer(tiny_checkpoint).decode(tokens[:first])


async def test_ignore_eos_ignores_the_models_end_token_but_not_the_requests_stop_tokens(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:
        tokens = token_ids(await answers(service.ask_text(sampling=DRAWN)))
    (tmp_path / "again").mkdir()
    async with service_of(tmp_path / "again", tiny_checkpoint, eos_ids=(tokens[5],)) as service:
        first = tokens.index(tokens[5])
        assert token_ids(await answers(service.ask_text(sampling=DRAWN))) == tokens[: first + 1]
        ignoring = but(DRAWN, ignore_eos=True)
        assert token_ids(await answers(service.ask_text(sampling=ignoring))) == tokens
        # A stop token of the request ends the answer even if it is the model's end token.
        stopping = but(ignoring, stop_token_ids=[tokens[5]])
        assert token_ids(await answers(service.ask_text(sampling=stopping))) == tokens[: first + 1]


async def test_top_logprobs_come_with_each_token(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:
        asked = but(DRAWN, logprobs=True, top_logprobs=3)
        deltas = [each.delta for each in await answers(service.ask_text(sampling=asked)) if each.HasField("delta")]
        assert [len(delta.top_logprobs) for delta in deltas] == [1] * DRAWN.max_new_tokens
        for delta in deltas:
            [top], [token], [logprob] = delta.top_logprobs, delta.token_ids, delta.logprobs
            assert len(set(top.token_ids)) == len(top.token_ids) == len(top.logprobs) == 3
            assert list(top.logprobs) == sorted(top.logprobs, reverse=True)
            assert dict(zip(top.token_ids, top.logprobs, strict=True)).get(token, logprob) == logprob
            assert logprob <= top.logprobs[0]
        likeliest = await answers(service.ask_text(sampling=but(asked, temperature=0)))
        for delta in (each.delta for each in likeliest if each.HasField("delta")):
            assert delta.top_logprobs[0].token_ids[0] == delta.token_ids[0]
        without = await answers(service.ask_text(sampling=but(DRAWN, logprobs=True)))
        assert not any(each.delta.top_logprobs for each in without)


async def test_penalties_count_the_tokens_of_the_answer(tmp_path: Path, tiny_checkpoint: Path) -> None:
    presence, frequency = 0.5, 0.75
    greedy = Sampling(max_new_tokens=19, logprobs=True, top_logprobs=20)
    async with service_of(tmp_path, tiny_checkpoint) as service:
        unpenalised = token_ids(await answers(service.ask_text(sampling=greedy)))
        asked = but(greedy, presence_penalty=presence, frequency_penalty=frequency)
        deltas = [each.delta for each in await answers(service.ask_text(sampling=asked)) if each.HasField("delta")]
    counts: Counter[int] = Counter()
    for delta in deltas:
        # The best token that is not in the answer yet is among the 20 likeliest: the answer has at most 18.
        top = zip(delta.top_logprobs[0].token_ids, delta.top_logprobs[0].logprobs, strict=True)
        scores = {token: value - presence * (counts[token] > 0) - frequency * counts[token] for token, value in top}
        assert delta.token_ids[0] == max(scores, key=scores.__getitem__)
        counts[delta.token_ids[0]] += 1
    assert list(counts.elements()) != unpenalised


async def test_each_of_n_answers_is_that_of_its_seed_alone(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:
        penalised = but(DRAWN, repetition_penalty=1.3, frequency_penalty=0.5)
        together = await answers(service.ask(sampling=but(penalised, seed=5, n=3)))
        for index in range(3):
            alone = token_ids(await answers(service.ask(sampling=but(penalised, seed=5 + index))))
            assert token_ids([each for each in together if each.delta.choice_index == index]) == alone
        finished = [each.finished for each in together if each.HasField("finished")]
        assert sorted(each.choice_index for each in finished) == [0, 1, 2]
        assert [each.usage.completion_tokens for each in finished] == [DRAWN.max_new_tokens] * 3
