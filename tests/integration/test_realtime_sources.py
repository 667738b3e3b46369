"""A camera that an application names, whose frames it need not send: by Realtime, over HTTP and on the page."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from playwright.async_api import async_playwright, expect

from tests.integration.fleet import Stack, exported_at, media_port, metric_in, until
from tests.integration.gateway import Gateway
from tests.integration.live import QUESTION
from tests.integration.realtime import ANSWER_MS, OWN, WATCHING, image, made, talking, updated
from tests.integration.test_live_streams import film
from tests.preprocessing.media_server import serving

PORT = media_port()
URL = f"http://localhost:{PORT}/camera"
WATCHED = WATCHING | {"gridsieve": OWN | {"source": URL, "source_name": "door", "snapshots": "slices"}}
# Of a drawn frame: without its picture, what is dimmed is dark, and the rest empty.
BRIGHTEST = """(canvas) => Math.max(...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data
  .filter((_, place) => place % 4 < 3))"""
TRIGGER = {
    "every_s": 1,
    "response": {
        "instructions": QUESTION,
        "conversation": "none",
        "max_output_tokens": 16,
        "metadata": {"who": "me"},
        "gridsieve": {"structured_outputs": {"json": {"enum": ["yes", "no"]}}},
    },
}


@pytest.fixture(scope="module")
def door(live_door: Gateway) -> Gateway:
    return live_door


@asynccontextmanager
async def filming() -> AsyncIterator[asyncio.Event]:
    """A camera at URL. Its video ends after the event is set."""
    enough = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        await film(writer, enough)
        writer.write(b"0\r\n\r\n")

    async with serving(answer, port=PORT):
        yield enough


async def test_a_session_watches_the_source_that_its_update_names(door: Gateway) -> None:
    """No frame comes from the client; its questions are about the source, whose end it is told."""
    async with filming() as enough, talking(door, WATCHED) as talk:
        piece = await talk.until("gridsieve.slice")
        assert piece["kept"] == list(range(piece["grid"]["h"] * piece["grid"]["w"]))
        assert piece["snapshot"].startswith("data:image/jpeg;base64,")
        assert piece["wall_clock"] == "service"
        for event, param in (
            (made(image(0)), "item.content[0]"),
            (updated(gridsieve={"source": f"{URL}/other"}), "session.gridsieve"),
        ):
            await talk.by.send_raw(json.dumps(event | {"event_id": param}))
            error = (await talk.until("error"))["error"]
            assert (error["event_id"], error["param"]) == (param, param)
        answer = await talk.answer(instructions=QUESTION)
        assert answer["usage"]["gridsieve"]["session"]["used_frames"] >= 2
        assert answer["gridsieve"].keys() == {"wall_time_s", "wall_clock", "snapshot"}
        enough.set()
        while (await talk.until("gridsieve.stream"))["state"] != "ended":
            pass
        assert (await talk.answer(instructions=QUESTION))["status"] != "failed"


async def test_a_source_that_cannot_be_watched_ends_the_session_by_its_name(door: Gateway) -> None:
    """Who may be watched is preprocessing's to say."""
    body = WATCHED | {"gridsieve": OWN | {"source": f"rtsp://127.0.0.1:{PORT}/x"}}
    async with talking(door, body) as talk:
        error = (await talk.until("error"))["error"]
        assert (error["type"], error["param"]) == ("permission_error", "session.gridsieve.source")
    async with httpx.AsyncClient(base_url=door.url, timeout=60) as http:
        events = [event async for event in watched(http, body)]
        assert [event["type"] for event in events] == ["session.created", "error"]
        assert (events[1]["error"]["type"], events[1]["error"]["param"]) == ("permission_error", "gridsieve.source")


async def watched(http: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async with http.stream("POST", "/v1/gridsieve/live", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        name = ""
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert event["type"] == name
                yield event


async def test_over_http_slices_and_answers_come_until_the_client_leaves_or_the_source_ends(
    door: Gateway, live_stack: Stack
) -> None:
    body = WATCHED | {"gridsieve": WATCHED["gridsieve"] | {"triggers": [TRIGGER]}}  # type: ignore[operator]
    async with filming() as enough, httpx.AsyncClient(base_url=door.url, timeout=60) as http:
        async for event in watched(http, body):
            if event["type"] == "response.done":
                break
        await until(
            lambda: metric_in(exported_at(f"{door.url}/metrics"), "gridsieve_requests_running", method="Live") == 0
        )
        await until(lambda: not live_stack.services["generation"].in_use())
        seen = []
        async for event in watched(http, body):
            seen.append(event)
            if event["type"] == "response.done":
                enough.set()
    kinds = [event["type"] for event in seen]
    assert kinds[0] == "session.created"
    assert kinds.count("response.created") == kinds.count("response.done") > 0
    assert kinds.index("gridsieve.slice") < kinds.index("response.created")
    done = seen[kinds.index("response.done")]["response"]
    assert done["metadata"] == {"who": "me"}
    assert done["output"][0]["content"][0]["text"] in ('"yes"', '"no"')
    assert [event["state"] for event in seen if event["type"] == "gridsieve.stream"][-1] == "ended"
    assert "error" not in kinds


def test_over_http_wrong_fields_are_refused_by_name(door: Gateway) -> None:
    with door.http() as http:
        for fields, status, param in (
            ({"gridsieve": {}}, 400, "gridsieve.source"),
            ({"model": "other"}, 404, "model"),
            ({"gridsieve": {"source": URL, "window_tokens": 4}}, 400, "gridsieve.window_tokens"),
            ({"gridsieve": {"source": URL, "triggers": [{"response": {}}]}}, 400, "gridsieve.triggers[0].response"),
        ):
            refused = http.post("/v1/gridsieve/live", json={"gridsieve": {"source": URL}} | fields)
            assert refused.status_code == status
            assert refused.json()["error"]["param"].startswith(param)


async def test_the_page_shows_a_camera_by_its_url(door: Gateway, live_stack: Stack, chromium: str) -> None:
    raised: list[str] = []
    async with filming() as enough, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = await browser.new_page()
        page.on("pageerror", lambda error: raised.append(str(error)))
        await page.goto(door.url)
        source, watch = page.get_by_label("or a camera's URL"), page.locator("#watch")
        await watch.click()
        await expect(page.locator("#file-error")).to_contain_text("URL")
        await source.fill(f"http://localhost:{PORT + 1}/")
        await source.press("Enter")
        await expect(page.locator("#file-error")).to_contain_text("The camera")
        await expect(watch).to_have_text("Watch it")
        await source.fill(URL)
        await watch.click()
        seen = page.locator("article.live")
        await expect(seen.locator("canvas")).to_be_visible(timeout=ANSWER_MS)
        assert await seen.locator("canvas").evaluate(BRIGHTEST) > 100
        await expect(page.locator("#preview-note")).to_contain_text("plays")
        await expect(seen.locator("figcaption").last).to_have_text(re.compile(r"^\d+ of \d+ visual tokens are new"))
        await page.get_by_label("Question").fill(QUESTION)
        await page.get_by_label("Longest answer").fill("8")
        await page.get_by_role("button", name="Ask").click()
        answer = page.locator("article:not(.live)[aria-busy=false]")
        await expect(answer.locator("h2")).to_have_text(QUESTION, timeout=ANSWER_MS)
        await expect(answer.locator(".text")).not_to_be_empty()
        enough.set()
        await expect(page.locator("#preview-note")).to_contain_text("ended", timeout=ANSWER_MS)
        await expect(page.locator("#question-error")).to_be_empty()
        await watch.click()
        await expect(watch).to_have_text("Watch it")
        await browser.close()
    assert not raised
    await until(lambda: not live_stack.services["generation"].in_use())
