"""The client against a hand-written generation service on a unix socket."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from client import (
    Accepted,
    Delta,
    Finished,
    FinishReason,
    FramesieveClient,
    Image,
    Message,
    Progress,
    Pruning,
    Text,
    Video,
)
from common import errors
from common.channels import REQUEST_ID_KEY
from common.interceptors import RequestInterceptor
from framesieve.v1 import encoder_pb2, generation_pb2, generation_pb2_grpc, prompt_pb2

MIB = 2**20
Behaviour = Callable[[generation_pb2.GenerateRequest, Any], AsyncIterator[generation_pb2.GenerateResponse]]


class FakeGeneration(generation_pb2_grpc.GenerationServiceServicer):
    """Answers every question in the way a test says, and remembers what it was asked."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.metadata: dict[str, Any] = {}
        self.cancelled = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        try:
            async for response in self.behaviour(request, context):
                yield response
        except (asyncio.CancelledError, GeneratorExit):  # the latter where gRPC is still writing the last response
            self.cancelled.set()
            raise


USAGE = generation_pb2.Usage(
    prompt_tokens_full=100,
    prompt_tokens=30,
    media=[
        generation_pb2.MediaUsage(
            modality=prompt_pb2.MODALITY_VIDEO,
            grid=prompt_pb2.Grid(t=4, h=5, w=4),
            kept_tokens=20,
            repaired_frames=1,
            first_slice_only=True,
        )
    ],
)


async def moving_ball(request: generation_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
    yield generation_pb2.GenerateResponse(accepted=generation_pb2.Accepted(request_id="r1", usage=USAGE))
    yield generation_pb2.GenerateResponse(
        progress=encoder_pb2.MediaProgress(media_index=0, decoded_slices=4, encoded_slices=3)
    )
    for text, token, logprob in (("A ", 5, -0.5), ("ball", 6, -0.25)):
        yield generation_pb2.GenerateResponse(
            delta=generation_pb2.Delta(text=text, token_ids=[token], logprobs=[logprob])
        )
    usage = generation_pb2.Usage()
    usage.CopyFrom(USAGE)
    usage.completion_tokens = 2
    timings = generation_pb2.Timings(time_to_first_token_s=0.75, plan_s=0.25, decode_s=0.5, generate_s=0.5)
    yield generation_pb2.GenerateResponse(
        finished=generation_pb2.Finished(reason=generation_pb2.FINISH_REASON_STOP, usage=usage, timings=timings)
    )


@asynccontextmanager
async def served(tmp_path: Path, behaviour: Behaviour) -> AsyncIterator[tuple[FramesieveClient, FakeGeneration]]:
    fake = FakeGeneration(behaviour)
    address = f"unix:{tmp_path}/generation.sock"
    server = grpc.aio.server(
        interceptors=[RequestInterceptor()], options=[("grpc.max_receive_message_length", 20 * MIB)]
    )
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(fake, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        async with FramesieveClient(address) as client:
            yield client, fake
    finally:
        await server.stop(0)


def refusing(error: errors.FramesieveError) -> Behaviour:
    async def refuse(request: Any, context: Any) -> AsyncIterator[Any]:
        raise error
        yield

    return refuse


async def test_the_answer_is_its_deltas_joined_with_usage_and_timings(tmp_path: Path) -> None:
    async with served(tmp_path, moving_ball) as (client, _):
        answer = await client.ask(Video(data=b"film"), "What moves?", logprobs=True)
    assert str(answer) == answer.text == "A ball"
    assert answer.request_id == "r1"
    assert answer.token_ids == (5, 6)
    assert answer.logprobs == (-0.5, -0.25)
    assert answer.reason is FinishReason.STOP
    assert (answer.usage.prompt_tokens_full, answer.usage.prompt_tokens, answer.usage.completion_tokens) == (100, 30, 2)
    (media,) = answer.usage.media
    assert (media.grid.t, media.grid.h, media.grid.w, media.kept_tokens) == (4, 5, 4, 20)
    assert media.repaired_frames == 1
    assert media.first_slice_only
    assert answer.timings.stages_s == {
        "fetch": 0.0, "plan": 0.25, "decode": 0.5, "resize": 0.0, "wait_for_encoder": 0.0,
        "encode": 0.0, "prune": 0.0, "transfer": 0.0, "wait_for_prefill": 0.0, "prefill": 0.0,
    }  # fmt: skip
    assert sum(answer.timings.stages_s.values()) == answer.timings.time_to_first_token_s
    assert answer.timings.tokens_per_second(completion_tokens=2) == 1 / 0.5


async def test_events_come_typed_and_in_their_order(tmp_path: Path) -> None:
    async with served(tmp_path, moving_ball) as (client, _):
        events = [event async for event in client.stream(Video(data=b"film"), "What moves?")]
    assert [type(event) for event in events] == [Accepted, Progress, Delta, Delta, Finished]
    assert events[1] == Progress(media_index=0, decoded_slices=4, encoded_slices=3)


async def test_media_stand_before_the_question_in_the_order_given(tmp_path: Path) -> None:
    clip, photo = tmp_path / "clip.mp4", tmp_path / "photo.PNG"
    clip.write_bytes(b"clip")
    photo.write_bytes(b"photo")
    async with served(tmp_path, moving_ball) as (client, fake):
        await client.ask([clip, str(photo), Text("and"), Video(server_path="films/a.mp4")], "What differs?")
    (message,) = fake.requests[0].prompt.messages
    assert message.role == prompt_pb2.ROLE_USER
    assert [part.WhichOneof("content") for part in message.parts] == ["video", "image", "text", "video", "text"]
    assert message.parts[0].video.data == b"clip"
    assert message.parts[1].image.data == b"photo"
    assert message.parts[3].video.path == "films/a.mp4"
    assert message.parts[4].text == "What differs?"


async def test_a_url_is_sent_as_it_stands_with_what_is_to_be_looked_at(tmp_path: Path) -> None:
    parts = [Image(url="https://a.test/x?sig=%2F", max_pixels=784), Video(url="http://a.test/y", fps=4)]
    async with served(tmp_path, moving_ball) as (client, fake):
        await client.ask(parts, "What differs?")
    image, video, _ = fake.requests[0].prompt.messages[0].parts
    assert (image.image.url, image.image.frame_sampling.max_pixels) == ("https://a.test/x?sig=%2F", 784)
    assert (video.video.url, video.video.frame_sampling.fps) == ("http://a.test/y", 4)


@pytest.mark.parametrize(
    ("location", "kind"),
    [
        ("http://a.test/clip.mp4", "video"),
        ("HTTPS://a.test/clip", "video"),
        ("https://a.test/photo.PNG", "image"),
        ("https://a.test/photo%2Ejpg?width=9#there", "image"),
        ("https://a.test/clip.mp4?poster=photo.png", "video"),
        ("https://a.test?x=/photo.png", "video"),
        ("http://[/photo.png", "image"),
        ("data:image/png;base64,AAAA", "image"),
        ("data:video/mp4;base64,AAAA", "video"),
        ("data:,photo.png", "video"),
    ],
)
async def test_what_starts_as_a_url_is_one_and_its_suffix_or_type_decides(
    tmp_path: Path, location: str, kind: str
) -> None:
    async with served(tmp_path, moving_ball) as (client, fake):
        await client.ask(location, "?")
    part = fake.requests[0].prompt.messages[0].parts[0]
    assert part.WhichOneof("content") == kind
    assert getattr(part, kind).url == location


async def test_a_path_that_only_looks_like_a_url_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "http:").mkdir()
    (tmp_path / "http:" / "clip.mp4").write_bytes(b"clip")
    (tmp_path / "data").write_bytes(b"data")
    monkeypatch.chdir(tmp_path)
    async with served(tmp_path, moving_ball) as (client, fake):
        await client.ask(["http:/clip.mp4", "data"], "?")
    parts = fake.requests[0].prompt.messages[0].parts
    assert [part.video.data for part in parts[:2]] == [b"clip", b"data"]


async def test_earlier_turns_come_first(tmp_path: Path) -> None:
    history = [
        Message("system", (Text("Be brief."),)),
        Message("user", (Image(data=b"photo", max_pixels=784), Text("What is it?"))),
        Message("assistant", (Text("A cat."),)),
    ]
    async with served(tmp_path, moving_ball) as (client, fake):
        await client.ask(None, "What colour?", history=history)
    messages = fake.requests[0].prompt.messages
    roles = [prompt_pb2.ROLE_SYSTEM, prompt_pb2.ROLE_USER, prompt_pb2.ROLE_ASSISTANT, prompt_pb2.ROLE_USER]
    assert [message.role for message in messages] == roles
    assert messages[1].parts[0].image.frame_sampling.max_pixels == 784
    assert [part.text for part in messages[3].parts] == ["What colour?"]


async def test_options_reach_the_service_and_what_is_left_out_stays_unset(tmp_path: Path) -> None:
    video = Video(data=b"film", fps=4, max_frames=8, start_s=0.0, pruning=Pruning(0.5, "random", seed=0))
    async with served(tmp_path, moving_ball) as (client, fake):
        await client.ask(video, "?", pruning_rate=0.75, temperature=0.0, seed=0, stop=["."], request_id="mine")
        await client.ask(video, "?")
    asked, plain = fake.requests
    assert asked.pruning.rate == 0.75
    assert asked.sampling.HasField("temperature")
    assert asked.sampling.HasField("seed")
    assert not asked.sampling.HasField("top_p")
    assert list(asked.sampling.stop) == ["."]
    assert asked.request_id == "mine"
    sampling = asked.prompt.messages[0].parts[0].video.frame_sampling
    assert (sampling.fps, sampling.max_frames, sampling.HasField("start_s"), sampling.HasField("end_s")) == (
        4, 8, True, False,
    )  # fmt: skip
    own = asked.prompt.messages[0].parts[0].video.pruning
    assert (own.rate, own.method, own.HasField("seed")) == (0.5, "random", True)
    assert plain.pruning.rate == 0
    assert plain.sampling == generation_pb2.Sampling()


async def test_the_request_id_is_in_the_metadata_too_so_that_every_log_names_it(tmp_path: Path) -> None:
    async with served(tmp_path, moving_ball) as (client, fake):
        await client.ask(None, "?", request_id="mine")
    assert fake.metadata[REQUEST_ID_KEY] == "mine"


async def test_a_request_id_that_no_metadata_can_carry_is_left_for_the_service_to_refuse(tmp_path: Path) -> None:
    async with served(tmp_path, moving_ball) as (client, fake):
        await client.ask(None, "?", request_id="naïve\n")
    assert fake.requests[0].request_id == "naïve\n"
    assert REQUEST_ID_KEY not in fake.metadata


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
        await asyncio.wait_for(fake.cancelled.wait(), 5)


async def test_a_stream_that_ends_early_is_no_answer(tmp_path: Path) -> None:
    async def half(request: Any, context: Any) -> AsyncIterator[Any]:
        yield generation_pb2.GenerateResponse(delta=generation_pb2.Delta(text="A "))

    async with served(tmp_path, half) as (client, _):
        with pytest.raises(errors.PeerContract, match="ended before its answer did"):
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


def test_the_client_needs_no_torch() -> None:
    code = "import sys, client, client.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
