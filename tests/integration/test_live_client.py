"""Live sessions by the Python client and by `gridsieve live`, through three real processes with the demo model."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from demo.example import CLIP, QUESTIONS
from gridsieve import (
    Delta,
    DropReason,
    Finished,
    FinishReason,
    GridsieveClient,
    InvalidRequest,
    LiveDropped,
    LiveEvent,
    LiveFinished,
    LiveSession,
    LiveSlice,
    LiveStream,
    StreamState,
    Trigger,
)
from gridsieve.__main__ import app
from gridsieve.cli.footage import pictures
from gridsieve.sync import GridsieveClient as SynchronousClient
from tests import media
from tests.gridsieve.terminal import CTRL_C, in_terminal
from tests.integration.fleet import Stack, media_port
from tests.preprocessing.media_server import head, serving

MOVES, HAPPENS = QUESTIONS
PORT = media_port()
GREEDY: Any = {"max_new_tokens": 32, "temperature": 0}


@cache
def frames() -> tuple[tuple[float, bytes], ...]:
    """Those of the clip, two a second: times and pictures."""
    return tuple(pictures(str(CLIP), 2.0))


@pytest.fixture
def address(demo: Stack) -> str:
    return demo.address


async def show(session: LiveSession, first: int, end: int) -> list[LiveEvent]:
    """Shows frames of the clip, a slice at a time so that none is late. Returns what happened until the last slice."""
    events = session.events()
    seen: list[LiveEvent] = []
    for number in range(first, end, 2):
        for time_s, picture in frames()[number : number + 2]:
            await session.show(picture, time_s)
        seen.append(await anext(events))
        while not isinstance(seen[-1], LiveSlice):
            seen.append(await anext(events))
    return seen


async def all_of(events: AsyncIterator[LiveEvent]) -> list[LiveEvent]:
    return [event async for event in events]


async def test_questions_are_answered_beside_the_frames_and_events_tell_everything(address: str) -> None:
    triggers = [Trigger(MOVES.text, every_s=6, sampling=GREEDY), Trigger("?", on_change=1)]
    opened: Any = {"system": "Be brief.", "triggers": triggers, "request_id": "mine", "window_tokens": 2048}
    async with GridsieveClient(address) as client, client.live(**opened) as session:
        assert (session.request_id, session.reserved_tokens) == ("mine", 2048 + 1024)
        everything = asyncio.create_task(all_of(session.events()))
        seen = await show(session, 0, 32)
        *deltas, finished = [part async for part in session.ask(HAPPENS.text, transient=True, **GREEDY)]
        answer = await session.answer(MOVES.text, logprobs=True, **GREEDY)
        await session.close()
        events = await everything
        with pytest.raises(InvalidRequest, match="closed"):
            await session.show(frames()[0][1])
    slices = [each for each in seen if isinstance(each, LiveSlice)]
    assert [each.last_time_s for each in slices] == [time_s for time_s, _ in frames()[1::2]]
    grid = slices[0].grid
    assert (grid.t, slices[0].kept.tolist()) == (1, list(range(grid.tokens)))
    assert all(each.kept.size < grid.tokens for each in slices[1:])
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.STOP
    assert "".join(each.text for each in deltas if isinstance(each, Delta)) == HAPPENS.answer
    assert len(answer.logprobs) == answer.usage.completion_tokens
    answers = [each for each in events if isinstance(each, LiveFinished)]
    assert [(each.question, each.ask_id, each.seen_s) for each in answers] == [
        (MOVES.text, "trigger-0", 6.5),
        (MOVES.text, "trigger-0", 12.5),
        (HAPPENS.text, "ask-0", 15.5),
        (MOVES.text, "ask-1", 15.5),
    ]
    assert answers[-1].answer == answer
    usage = answers[-1].usage
    assert (usage.frames, usage.used_frames, usage.dropped_frames) == (32, 32, 0)
    assert usage.media_tokens == sum(each.kept.size for each in slices)


async def test_a_cancelled_answer_ends_and_the_session_goes_on(address: str) -> None:
    async with GridsieveClient(address) as client, client.live() as session:
        await show(session, 0, 2)
        waiting = asyncio.create_task(session.answer("?"))
        parts = []
        async for part in session.ask(MOVES.text, ignore_eos=True):
            if not parts:
                await session.cancel()
            parts.append(part)
        assert parts[-1].reason is (await waiting).reason is FinishReason.CANCELLED
        await show(session, 2, 4)
        assert (await session.answer(MOVES.text, **GREEDY)).reason is FinishReason.STOP


async def test_pixels_and_pieces_of_encoded_video_are_shown_too(address: str) -> None:
    film = media.stream("mpegts")
    async with GridsieveClient(address) as client:
        async with client.live() as session:
            events = session.events()
            for time_s, pixels in media.shown(film)[:2]:
                await session.show(pixels, time_s)
            by_pixels = await anext(events)
        async with client.live() as session:
            events = session.events()
            for place in range(0, len(film), 1777):
                await session.send_clip(film[place : place + 1777])
            await session.close()
            seen = await all_of(events)
    assert [each.state for each in seen if isinstance(each, LiveStream)] == [StreamState.ENDED]
    assert isinstance(by_pixels, LiveSlice)
    grids = [each.grid for each in seen if isinstance(each, LiveSlice)]  # of those that were not late
    assert by_pixels.grid == grids[0]


async def test_frames_that_several_tasks_show_without_a_time_are_in_order(address: str, tmp_path: Path) -> None:
    (tmp_path / "frame.jpg").write_bytes(frames()[0][1])
    async with GridsieveClient(address) as client, client.live() as session:
        everything = asyncio.create_task(all_of(session.events()))
        await asyncio.gather(session.show(tmp_path / "frame.jpg"), session.show(frames()[0][1]))
        await session.close()
        assert not [event for event in await everything if isinstance(event, LiveDropped)]


async def test_errors_name_field_value_and_limit_and_a_refused_question_does_not_end_the_session(address: str) -> None:
    async with GridsieveClient(address) as client:
        with pytest.raises(InvalidRequest) as caught:
            async with client.live(fps=100):
                pass
        told = caught.value
        assert (told.field, told.value, told.limit) == ("open.fps", "100.0", "above 0 and at most 60")
        with pytest.raises(InvalidRequest, match=r"^open\.triggers\[0\] must have every_s or on_change$"):
            async with client.live(triggers=[Trigger("?")]):
                pass
        with pytest.raises(InvalidRequest, match=r"^open\.window_tokens must be a 32-bit integer"):
            client.live(window_tokens=2**40)
        async with client.live() as session:
            with pytest.raises(TypeError, match="unknown option 'pruning_rate'"):
                await session.answer("?", pruning_rate=0.5)
            await show(session, 0, 2)
            with pytest.raises(InvalidRequest, match=r"must be above 0 and at most 1, got 2\.0$") as caught:
                await session.answer("?", top_p=2.0)
            assert caught.value.field == "sampling.top_p"
            events = session.events()
            await session.show(b"no picture", 1.0)
            await session.show(b"no picture", 1.5)
            lost = await anext(events)
            assert isinstance(lost, LiveDropped)
            assert (lost.frames, lost.reason) == (2, DropReason.REFUSED)
            assert (await session.answer(MOVES.text, **GREEDY)).reason is FinishReason.STOP


def test_the_synchronous_client_has_the_same_calls(address: str) -> None:
    with SynchronousClient(address) as client, client.live(fps=1) as session:
        events = session.events()
        session.show(frames()[0][1])
        *_, finished = session.ask(MOVES.text, **GREEDY)
        assert isinstance(finished, Finished)
        assert session.answer(MOVES.text, **GREEDY).reason is FinishReason.STOP
        session.close()
        assert [event.question for event in events if isinstance(event, LiveFinished)] == [MOVES.text] * 2


# --- gridsieve live -------------------------------------------------------------------------------------------


def live(*arguments: str) -> Result:
    return CliRunner().invoke(app, ("live", *arguments))


def test_a_file_is_played_and_each_answer_is_a_line(address: str) -> None:
    told = live(str(CLIP), MOVES.text, "--every-s", "4", "--speed", "8", "--json", "--server", address)
    assert told.exit_code == 0, told.output
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    times_s = [each["time_s"] for each in lines]
    assert times_s == sorted(times_s)
    assert times_s[0] >= 4
    for each in lines:
        assert (each["question"], each["answer"] != "") == (MOVES.text, True)
        assert each["session"]["frames"] <= len(frames())
    assert f"{len(frames())} frames" in told.stderr
    told = live(str(CLIP), HAPPENS.text, "--every-s", "0", "--speed", "32", "--server", address)
    assert told.stdout.startswith("15.5 s: ")
    assert "1 answers of" in told.stderr


async def test_a_source_is_watched_by_its_url(address: str) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(head(200) + media.stream("mpegts"))

    async def watched() -> dict[str, Any]:
        command = [sys.executable, "-m", "gridsieve", "live", f"http://localhost:{PORT}/", "?", "--every-s", "60"]
        process = await asyncio.create_subprocess_exec(*command, "--json", "--server", address, stdout=PIPE)
        told: dict[str, Any] = json.loads((await process.communicate())[0])
        return told

    async with serving(answer, port=PORT):
        session = (await watched())["session"]  # all comes at once, so newer frames may take the place of others
        assert session["used_frames"] >= 1
        assert session["used_frames"] + session["dropped_frames"] == 6
    assert (await watched())["error"]["message"].startswith("SOURCE cannot be connected to")


def test_questions_are_typed_while_it_runs_and_ctrl_c_ends_it(address: str) -> None:
    with in_terminal("live", str(CLIP), MOVES.text, "--every-s", "1", "--server", address) as terminal:
        terminal.wait_for("1.5 s: ")
        terminal.type(f"{HAPPENS.text}\n")
        terminal.wait_for(" s: A ")
        terminal.type(CTRL_C)
        terminal.wait_for(" answers of ")
        assert terminal.left() == 130


def test_errors_are_told_in_words_of_the_command(address: str, tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_bytes(b"no video")
    for arguments, told in (
        (("--fps", "100"), "INVALID_REQUEST: --fps must be above 0 and at most 60, got 100.0"),
        (("--on-change", "2"), "INVALID_REQUEST: --on-change must be above 0, and at most 1, got 2.0"),
        (("--temperature", "-1"), "INVALID_REQUEST: --temperature must be"),
    ):
        result = live(str(CLIP), "?", *arguments, "--server", address)
        assert result.exit_code == 1
        assert result.stderr.startswith(told)
    result = live(str(tmp_path / "text.mp4"), "?", "--json", "--server", address)
    assert json.loads(result.stdout)["error"]["reason"] == "MEDIA_REJECTED"
    result = live(str(tmp_path / "none.mp4"), "?", "--server", address)
    assert result.stderr == f"FILE: {tmp_path}/none.mp4: No such file or directory\n"
