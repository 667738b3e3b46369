"""Live sessions through three real processes: answers are those of one question about all that was seen."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Frames, Message, Pruning, Text, Video
from gridsieve.v1 import generation_pb2, prompt_pb2
from gridsieve.v1.generation_pb2 import LiveAsk, LiveFrame, Sampling
from tests import media
from tests.integration.fleet import Stack, running, stopped_workers, until
from tests.integration.live import (
    GREEDY,
    MAX_PIXELS,
    PICTURES,
    QUESTION,
    SECOND,
    assert_same,
    lines_with,
    video,
    watching,
)

LARGE = PICTURES[0] + bytes(80_000)
# Of a client.
MAX_BYTES = 60_000


@dataclass(frozen=True)
class Served:
    folder: Path
    stack: Stack

    @property
    def address(self) -> str:
        return self.stack.address


@pytest.fixture(scope="module", params=["qwen2_5_vl"])
def served(request: pytest.FixtureRequest, checkpoints: Callable[[str], Path]) -> Iterator[Served]:
    folder = checkpoints(request.param)
    # The frames of a session may come to more than a client's bytes, as 40 pictures do.
    flags = ("--kv-cache-tokens", "4096", "--live-tokens", "2048", "--max-bytes-per-client", str(MAX_BYTES))
    with running(folder, flags={"generation": flags}) as stack:
        yield Served(folder, stack)


def of_families(count: int) -> pytest.MarkDecorator:
    """Of what the family decides, which tests of generation cover for all three: after the first `count` it is deep."""
    names = ("qwen2_5_vl", "qwen3_5", "qwen3_vl")
    deep = (pytest.param(name, marks=pytest.mark.deep) for name in names[count:])
    return pytest.mark.parametrize("served", [*names[:count], *deep], indirect=True, scope="module")


def said(served: Served) -> tuple[int, Sampling]:
    """The token of the answer "a", and what makes it the answer."""
    word = Tokenizer.from_file(str(served.folder / "tokenizer.json")).encode("a").ids[0]
    return word, Sampling(max_new_tokens=1, temperature=0, logprobs=True, logit_bias={word: 100})


@of_families(2)
async def test_answers_are_those_of_one_question_about_all_that_was_seen(served: Served) -> None:
    """A question that leaves no trace, one that stays, and one about frames after it."""
    system = Message("system", (Text("Be brief."),))
    opening = [prompt_pb2.Message(role=prompt_pb2.ROLE_SYSTEM, parts=[prompt_pb2.Part(text="Be brief.")])]
    word, one_word = said(served)
    times_s = [0.5 * number for number in range(12)]
    async with GridsieveClient(served.address) as client, watching(served.address, messages=opening) as live:
        await live.show(PICTURES[:8], [30 + time_s for time_s in times_s[:8]])
        answer = await live.ask(QUESTION, transient=True)
        seen = video(0, 8, times_s[:8])
        assert_same(answer, await client.ask(seen, QUESTION, history=[system], **GREEDY))
        assert (await live.ask(QUESTION, one_word))[0] == [word]
        await live.show(PICTURES[8:12], [30 + time_s for time_s in times_s[8:]])
        answer = await live.ask(SECOND)
        turns = [system, Message("user", (seen, Text(QUESTION))), Message("assistant", (Text("a"),))]
        expected = await client.ask(video(8, 12, times_s[8:]), SECOND, history=turns, **GREEDY)
        assert_same(answer, expected)
        usage = live.seen[-1].finished
        assert usage.finished.usage.prompt_tokens == expected.usage.prompt_tokens
        assert (usage.usage.frames, usage.usage.used_frames, usage.usage.dropped_frames) == (12, 12, 0)


@of_families(2)
async def test_slices_in_which_nothing_changes_leave_answers_as_they_are(served: Served) -> None:
    """Slices of the same files, of others after a cut, and of other files of the same scene."""
    pictures = [*PICTURES[:1] * 4, *PICTURES[1:2] * 6, *[PICTURES[1] + bytes(1)] * 6]
    times_s = tuple(0.5 * number for number in range(16))
    changed = prompt_pb2.Pruning(method="pixel_change", threshold=0.1)
    async with GridsieveClient(served.address) as client, watching(served.address, pruning=changed) as live:
        await live.show(pictures, times_s)
        answer = await live.ask(QUESTION, transient=True)
        [whole, *kept] = [each.slice.kept.shape[0] for each in live.seen if each.HasField("slice")]
        assert kept == [0, whole, 0, 0, 0, 0, 0]
        pruning = Pruning(method="pixel_change", threshold=0.1)
        seen = Video(frames=Frames(tuple(pictures), times_s), max_pixels=MAX_PIXELS, pruning=pruning)
        assert_same(answer, await client.ask(seen, QUESTION, **GREEDY))


@of_families(1)
async def test_what_changes_is_kept_and_what_is_old_is_evicted(served: Served) -> None:
    """A scene that stands still costs hardly anything; cuts fill the window, and the oldest slices leave it."""
    pruning = prompt_pb2.Pruning()  # by what changes
    async with watching(served.address, pruning=pruning, window_tokens=128) as live:
        times_s = [0.5 * number for number in range(40)]
        still = PICTURES[:1] * 8
        await live.show(still, times_s[:8])
        slices = [each.slice for each in live.seen if each.HasField("slice")]
        grid = slices[0].grid
        assert [each.kept.shape[0] for each in slices] == [grid.h * grid.w, 0, 0, 0]
        await live.show([PICTURES[number % 12] for number in range(32)], times_s[8:])
        slices = [each.slice for each in live.seen if each.HasField("slice")]
        assert len(slices) == 20
        assert max(each.usage.held_tokens for each in slices) <= 128
        assert slices[-1].usage.evicted_tokens == sum(each.evicted.tokens for each in live.seen) > 150
        assert (await live.ask(QUESTION))[0]


async def test_a_session_begins_again_with_frames_of_another_size(served: Served) -> None:
    """As of a camera that is opened again. The slice in which the size changes is refused."""
    wide = [media.picture(56, 112, seed) for seed in range(4)]
    times_s = [0.5 * number for number in range(10)]
    async with GridsieveClient(served.address) as client, watching(served.address) as live:
        await live.show(PICTURES[:4], times_s[:4])
        for picture, time_s in zip((PICTURES[4], wide[0]), times_s[4:6], strict=True):
            await live.send(frame=LiveFrame(picture=picture, time_s=time_s))
        assert (await live.until("dropped")).reason == generation_pb2.DROP_REASON_REFUSED
        await live.show(wide, times_s[6:])
        answer = await live.ask(QUESTION)
        frames, none = Frames(tuple(wide), tuple(times_s[6:])), Pruning(method="none")
        seen = Video(frames=frames, max_pixels=MAX_PIXELS, pruning=none)
        assert_same(answer, await client.ask(seen, QUESTION, **GREEDY))
        assert [each.restarted.segments for each in live.seen if each.HasField("restarted")] == [0]


@of_families(1)
async def test_a_slice_that_can_never_fit_is_refused_alone(served: Served) -> None:
    """Its frames are of another size: 64 tokens of Qwen3-VL and more of Qwen2.5-VL, after some 20 of text."""
    large = [media.picture(448, 448, seed) for seed in range(2)]
    async with watching(served.address, window_tokens=80, max_pixels=4 * 448 * 448) as live:
        await live.show(PICTURES[:2], (0, 0.5))
        for number, picture in enumerate(large):
            await live.send(frame=LiveFrame(picture=picture, time_s=1 + number / 2))
        async with asyncio.timeout(60):
            dropped = await live.until("dropped")
        assert (dropped.frames, dropped.reason) == (2, generation_pb2.DROP_REASON_REFUSED)
        await live.show(PICTURES[2:4], (2, 2.5))
        assert not any(each.HasField("restarted") or each.HasField("evicted") for each in live.seen)


async def test_a_long_question_before_the_first_frame_goes_when_it_leaves_no_room(served: Served) -> None:
    times_s = [0.5 * number for number in range(4)]
    async with GridsieveClient(served.address) as client, watching(served.address, window_tokens=64) as live:
        await live.ask("What moves? " * 8, said(served)[1])
        await live.show(PICTURES[:4], times_s)
        assert [each.WhichOneof("response") for each in live.seen][-4:] == ["evicted", "restarted", "slice", "slice"]
        answer = await live.ask(QUESTION)
        assert_same(answer, await client.ask(video(0, 4, times_s), QUESTION, **GREEDY))


async def test_frames_beyond_the_bytes_of_a_client_are_dropped_and_no_session_ends(served: Served) -> None:
    """A session that rests uses nothing of them."""
    sizes = [sum(map(len, PICTURES[:2])), sum(map(len, PICTURES[2:4]))]
    assert max(sizes) < MAX_BYTES < len(LARGE) < 2 * MAX_BYTES
    async with watching(served.address) as first, watching(served.address) as second:
        for number, live in enumerate([first, second] * (MAX_BYTES // min(sizes) + 1)):
            await live.show(PICTURES[:2], (number, number + 0.5))
        await first.show(PICTURES[:1], (100,))
        await first.send(frame=LiveFrame(picture=LARGE, time_s=100.5))
        dropped = await first.until("dropped")
        assert (dropped.frames, dropped.reason) == (2, generation_pb2.DROP_REASON_NO_ROOM)
        for live in (first, second):
            assert (await live.ask(QUESTION))[0]


async def test_a_session_is_a_line_in_the_logs_and_so_is_each_answer(served: Served) -> None:
    async with watching(served.address, request_id="one-session", source_name="door") as live:
        for number in range(2):
            await live.show(PICTURES[:4], [2 * number + time_s for time_s in (0, 0.5, 1, 1.5)])
            await live.ask(QUESTION)
        await live.send(close={})
        assert await live.call.read() is grpc.aio.EOF
    await until(lambda: "request ended" in {each["event"] for each in lines_with(served.stack, "one-session")})
    lines = lines_with(served.stack, "one-session")
    ended = ["answer ended", "answer ended", "request ended"]
    assert [(each["event"], each["service"]) for each in lines] == [(event, "generation") for event in ended]
    assert {each["source_name"] for each in lines} == {"door"}
    used = [each.finished.finished.usage.completion_tokens for each in live.seen if each.HasField("finished")]
    assert [each["completion_tokens"] for each in lines] == [*used, sum(used)]


async def test_a_question_reads_no_picture_again(served: Served) -> None:
    async with watching(served.address) as live:
        await live.show(PICTURES[:2], (0, 0.5))
        with stopped_workers(served.stack.services["preprocessing"]):
            async with asyncio.timeout(60):
                assert (await live.ask(QUESTION))[0]


async def test_a_caller_that_vanishes_frees_its_blocks_within_a_second(served: Served) -> None:
    generation = served.stack.services["generation"]
    async with watching(served.address) as live:
        await live.show(PICTURES[:2], (0, 0.5))
        long = Sampling(max_new_tokens=100, temperature=0, ignore_eos=True)
        await live.send(ask=LiveAsk(parts=[prompt_pb2.Part(text=QUESTION)], sampling=long))
        await live.until("delta")
        held = await asyncio.to_thread(generation.metric, "gridsieve_generation_kv_blocks_used")
        assert held == (512 + 128) / 16
    began = time.monotonic()
    while await asyncio.to_thread(generation.in_use):
        assert time.monotonic() - began < 1
        await asyncio.sleep(0.05)


async def test_sessions_are_refused_where_no_room_is_left(served: Served) -> None:
    async with watching(served.address, window_tokens=1024, answer_tokens=512):
        with pytest.raises(grpc.aio.AioRpcError, match="live sessions have 1536 tokens") as refused:
            async with watching(served.address):
                pass
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for wrong, opened in (
        ("evs_causal with a rate", {"pruning": prompt_pb2.Pruning(method="evs", rate=0.5)}),
        ("be at most 2048", {"window_tokens": 2000}),
        ("must not end with a turn of the user", {"messages": [{"role": "ROLE_USER", "parts": [{"text": "Hi"}]}]}),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=wrong):
            async with watching(served.address, **opened):
                pass


async def test_beyond_the_trained_positions_a_session_begins_again_from_its_window(served: Served) -> None:
    """Slices so far from each other that the eighth is beyond them, where positions follow the time."""
    config = json.loads((served.folder / "config.json").read_text())
    trained = config["text_config"]["max_position_embeddings"]
    step_s = trained * 3 // 80
    times_s = [step_s * number for number in range(16)]  # two positions a second, two frames a slice
    async with GridsieveClient(served.address) as client, watching(served.address, window_tokens=80) as live:
        await live.show(PICTURES[:16], times_s)
        [repeated] = [each.restarted.segments for each in live.seen if each.HasField("restarted")]
        assert 1 <= repeated <= 3
        answer = await live.ask(QUESTION)
        first = 14 - 2 * repeated
        assert_same(answer, await client.ask(video(first, 16, times_s[first:]), QUESTION, **GREEDY))


@pytest.mark.parametrize("served", ["qwen3_5"], indirect=True, scope="module")
async def test_with_a_recurrent_state_a_session_begins_again_from_half_its_window(served: Served) -> None:
    """What stays has a question with its answer; in a second session slices become too old."""
    times_s = [0.5 * number for number in range(16)]
    async with GridsieveClient(served.address) as client, watching(served.address, window_tokens=208) as live:
        await live.show(PICTURES[:12], times_s[:12])
        await live.ask(QUESTION, said(served)[1])
        await live.show(PICTURES[12:16], times_s[12:])
        kinds = [each.WhichOneof("response") for each in live.seen]
        assert kinds[-5:] == ["finished", "slice", "evicted", "restarted", "slice"]
        assert (live.seen[-3].evicted.segments, live.seen[-2].restarted.segments) == (4, 4)
        assert live.seen[-1].slice.usage.held_tokens <= 208 / 2 + 23
        answer = await live.ask(SECOND)
        turns = [Message("user", (video(8, 12, times_s[8:12]), Text(QUESTION))), Message("assistant", (Text("a"),))]
        assert_same(answer, await client.ask(video(12, 16, times_s[12:]), SECOND, history=turns, **GREEDY))
    async with watching(served.address, window_s=4) as live:
        await live.show(PICTURES[:12], times_s[:12])
        assert [each.restarted.segments for each in live.seen if each.HasField("restarted")] == [2]


async def test_a_session_asks_by_itself_in_time_and_when_the_scene_changes(served: Served) -> None:
    def trigger(name: str, **condition: float) -> generation_pb2.LiveTrigger:
        short = Sampling(max_new_tokens=2, temperature=0)
        asked = LiveAsk(ask_id=name, parts=[prompt_pb2.Part(text=QUESTION)], sampling=short, transient=True)
        return generation_pb2.LiveTrigger(ask=asked, **condition)

    triggers = [trigger("time", every_s=3), trigger("change", on_change=0.5)]
    async with watching(served.address, pruning=prompt_pb2.Pruning(), triggers=triggers) as live:
        shown = [*PICTURES[:1] * 6, *PICTURES[1:2] * 4, *PICTURES[2:3] * 4]
        await live.show(shown, [0.5 * number for number in range(len(shown))])
        await live.send(close={})
        while (response := await live.call.read()) is not grpc.aio.EOF:
            live.seen.append(response)
    told = [each.slice.last_time_s if each.HasField("slice") else each.finished.ask_id for each in live.seen]
    told = [each for each in told if each]
    assert told == [0.5, 1.5, 2.5, 3.5, "time", "change", 4.5, 5.5, "change", 6.5, "time"]
    assert live.seen[-1].finished.usage.completion_tokens == 8


@pytest.mark.parametrize("away", ["preprocessing", "encoder"])
async def test_a_session_goes_on_without_a_service_and_says_what_is_lost(served: Served, away: str) -> None:
    """Frames are dropped; a question, which needs preprocessing for its text, is refused alone."""
    service = served.stack.services[away]
    async with watching(served.address) as live:
        await live.show(PICTURES[:2], (0, 0.5))
        await asyncio.to_thread(service.kill)
        for number in (2, 3):
            await live.send(frame=LiveFrame(picture=PICTURES[number], time_s=number / 2))
        dropped = await live.until("dropped")
        assert (dropped.frames, dropped.reason) == (2, generation_pb2.DROP_REASON_UNAVAILABLE)
        tokens, _ = await live.ask(QUESTION, transient=True)
        finished = live.seen[-1].finished
        if away == "encoder":
            assert tokens
        else:
            assert not tokens
            assert finished.finished.reason == generation_pb2.FINISH_REASON_UNAVAILABLE
            assert "preprocessing" in finished.error
        await asyncio.to_thread(service.start)
        await asyncio.to_thread(service.ready)
        seen = asyncio.create_task(live.until("slice"))
        for number in range(4, 80):  # the channel connects again within seconds
            if seen.done():
                break
            await live.send(frame=LiveFrame(picture=PICTURES[number % 16], time_s=number / 2))
            await asyncio.sleep(0.1)
        await seen
        for _ in range(80):  # slices come through the encoder, whose channel connects before or after generation's own
            if (await live.ask(QUESTION))[0]:
                break
            await asyncio.sleep(0.1)
        assert live.seen[-1].finished.usage.used_frames > 2


async def test_a_session_that_begins_again_without_the_encoder_says_what_it_lost(served: Served) -> None:
    """A question close to the trained positions: its text is laid out, and the slices before it cannot be encoded."""
    config = json.loads((served.folder / "config.json").read_text())
    encoder = served.stack.services["encoder"]
    end_s = config["text_config"]["max_position_embeddings"] // 2 - 20  # two positions a second
    async with watching(served.address) as live:
        await live.show(PICTURES[:4], (0, 0.5, end_s, end_s + 0.5))
        await asyncio.to_thread(encoder.kill)
        long = Sampling(max_new_tokens=60, temperature=0, ignore_eos=True)
        tokens, _ = await live.ask(QUESTION, long)
        assert len(tokens) == 60
        told = [each for each in live.seen if each.HasField("restarted") or each.HasField("evicted")]
        assert [each.WhichOneof("response") for each in told] == ["restarted", "evicted"]
        assert told[0].restarted.segments == told[1].evicted.segments == 2
    await asyncio.to_thread(encoder.start)
    await asyncio.to_thread(encoder.ready)
