"""How the client's calls end without an answer: refused, out of time, left, broken off, or never sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from common.contract import errors
from framesieve import Accepted, FramesieveClient, Video
from framesieve.v1 import generation_pb2
from tests.framesieve.generation_stand_in import MIB, USAGE, Behaviour, moving_ball, served


def refusing(error: errors.FramesieveError) -> Behaviour:
    async def refuse(request: Any, context: Any) -> AsyncIterator[Any]:
        raise error
        yield

    return refuse


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest("pruning.rate must be below 1, got 1.5"),
        errors.PromptTooLong("the prompt has 9000 tokens, 4096 fit"),
        errors.MediaDamaged("12 of 40 frames cannot be decoded"),
        errors.MediaForbidden("../secret lies outside --media-root"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_refusal_is_the_leaf_that_the_service_raised_in_its_own_words(
    tmp_path: Path, error: errors.FramesieveError
) -> None:
    async with served(tmp_path, refusing(error)) as (client, _):
        with pytest.raises(type(error)) as raised:
            await client.ask(None, "?")
    assert type(raised.value) is type(error)
    assert str(raised.value) == str(error)


async def test_an_overloaded_service_says_when_to_try_again(tmp_path: Path) -> None:
    async with served(tmp_path, refusing(errors.Overloaded("the queue is full", retry_after_s=2.5))) as (client, _):
        with pytest.raises(errors.Overloaded) as raised:
            await client.ask(None, "?")
    assert raised.value.retry_after_s == 2.5


async def test_a_gone_stage_is_named(tmp_path: Path) -> None:
    async with served(tmp_path, refusing(errors.Unavailable("the encoder is gone", "encoder"))) as (client, _):
        with pytest.raises(errors.Unavailable) as raised:
            await client.ask(None, "?")
    assert raised.value.stage == "encoder"


async def test_nobody_listening_is_unavailable(tmp_path: Path) -> None:
    async with FramesieveClient(f"unix:{tmp_path}/nobody.sock") as client:
        with pytest.raises(errors.Unavailable) as raised:
            await client.ask(None, "?")
    assert raised.value.stage == "generation"


async def hanging(request: Any, context: Any) -> AsyncIterator[Any]:
    yield generation_pb2.GenerateResponse(accepted=generation_pb2.Accepted(request_id="r1", usage=USAGE))
    await asyncio.sleep(60)


async def test_a_deadline_ends_the_call(tmp_path: Path) -> None:
    async with served(tmp_path, hanging) as (client, _):
        with pytest.raises(errors.DeadlinePassed):
            await client.ask(None, "?", timeout_s=0.2)


async def test_leaving_the_loop_cancels_the_request(tmp_path: Path) -> None:
    async with served(tmp_path, hanging) as (client, fake):
        async for event in client.stream(None, "?"):
            assert isinstance(event, Accepted)
            break
        await asyncio.wait_for(fake.cancelled.wait(), 20)


async def test_a_stream_that_ends_early_is_no_answer(tmp_path: Path) -> None:
    async def half(request: Any, context: Any) -> AsyncIterator[Any]:
        yield generation_pb2.GenerateResponse(delta=generation_pb2.Delta(text="A "))

    async with served(tmp_path, half) as (client, _):
        with pytest.raises(errors.PeerContract, match="ended before all completions were finished"):
            await client.ask(None, "?")


async def test_an_unknown_event_breaks_the_contract(tmp_path: Path) -> None:
    async def nothing(request: Any, context: Any) -> AsyncIterator[Any]:
        yield generation_pb2.GenerateResponse()

    async with served(tmp_path, nothing) as (client, _):
        with pytest.raises(errors.PeerContract):
            await client.ask(None, "?")


async def test_sixteen_mebibytes_of_files_go_through_and_a_byte_more_is_refused_unsent(tmp_path: Path) -> None:
    full, more = tmp_path / "full.mp4", tmp_path / "more.mp4"
    full.write_bytes(bytes(16 * MIB))
    more.write_bytes(b"1")
    async with served(tmp_path, moving_ball) as (client, fake):
        await client.ask(full, "?")
        with pytest.raises(errors.InvalidRequest, match="server_path="):
            await client.ask([full, more], "?")
        with pytest.raises(errors.InvalidRequest, match=r"Video\.url has 16\.0 MiB, a prompt carries at most 16 MiB"):
            await client.ask("data:," + "x" * 16 * MIB, "?")
    assert len(fake.requests) == 1


async def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    async with served(tmp_path, moving_ball) as (client, _):
        with pytest.raises(FileNotFoundError):
            await client.ask(tmp_path / "no.mp4", "?")


@pytest.mark.parametrize("sources", [{}, {"data": b"x", "server_path": "a"}, {"url": "http://a/", "path": "a"}])
def test_media_has_exactly_one_source(sources: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRequest, match="exactly one of path, data, server_path, url and embeds"):
        Video(**sources)
