"""The page in a real Chromium before the real services: a dropped clip, its answers, and errors in their place."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from demo.example import CLIP
from framesieve import FramesieveClient, Pruning, Video
from framesieve.client.answer import Usage
from framesieve.client.encoding import Encoded, encode
from framesieve.common.contract.retention import AUTO_THRESHOLD, METHODS, NONE, PIXEL_CHANGE
from tests import media
from tests.integration.conftest import SERVED_NAME
from tests.integration.fleet import Stack
from tests.integration.gateway import Gateway, gateway

ANSWER_MS = 60_000
NARROW_PX = 400
DROP = """(target, [name, type, data]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([bytes], name, { type }));
  target.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
}"""
# When the text of each answer grew.
NOTE_TIMES = """(answers) => new MutationObserver((changes) => {
  for (const { target } of changes.filter(({ target }) => target.matches?.(".text"))) {
    (target.closest("article").timesMs ??= []).push(performance.now());
  }
}).observe(answers, { childList: true, subtree: true })"""
# The share of a drawn frame that is as dark as dimmed tokens are. The demo's clip is brighter everywhere.
DARK = """(canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let dark = 0;
  for (let at = 0; at < data.length; at += 4) dark += Math.max(data[at], data[at + 1], data[at + 2]) < 90;
  return dark / (data.length / 4);
}"""


@pytest.fixture(scope="module")
def door(stack: Stack, media_root: Path) -> Iterator[Gateway]:
    encoder = stack.addresses["encoder"]
    with gateway(stack.address, media_root, "--encoder", encoder) as started:
        yield started


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser, door: Gateway) -> Iterator[Page]:
    """The page, which loads nothing from elsewhere and raises nothing."""
    asked: list[str] = []
    raised: list[str] = []
    opened = browser.new_page()
    opened.on("request", lambda request: asked.append(request.url))
    opened.on("pageerror", lambda error: raised.append(str(error)))
    opened.goto(door.url)
    yield opened
    opened.close()
    assert not raised
    assert [url for url in asked if not url.startswith((door.url, f"blob:{door.url}", "data:"))] == []


def drop(page: Page, name: str, mime_type: str, data: bytes) -> None:
    page.locator("#drop").evaluate(DROP, [name, mime_type, base64.b64encode(data).decode()])


def ask(page: Page, question: str) -> None:
    page.get_by_label("Question").fill(question)
    page.get_by_label("Longest answer").fill("16")
    page.get_by_role("button", name="Ask").click()


def finished(page: Page, count: int) -> list[Locator]:
    expect(page.locator("article[aria-busy=false]")).to_have_count(count, timeout=ANSWER_MS)
    return page.locator("article").all()


def cost(article: Locator) -> dict[str, str]:
    return dict(zip(article.locator("dt").all_inner_texts(), article.locator("dd").all_inner_texts(), strict=True))


def test_a_dropped_clip_plays_and_is_answered_at_two_rates(page: Page, stack: Stack) -> None:
    drop(page, "clip.mp4", "video/mp4", CLIP.read_bytes())
    assert page.get_by_label("The clip").evaluate("async (video) => { await video.play(); return !video.paused; }")
    page.locator("#answers").evaluate(NOTE_TIMES)
    page.get_by_label("Compare with another rate").check()
    ask(page, "What moves?")
    for article, rate, heading in zip(finished(page, 2), (0.0, 0.75), ("Not pruned", "Pruned by 75 %"), strict=True):
        expect(article.get_by_role("heading")).to_have_text(heading)
        expect(article.locator(".text")).not_to_be_empty()
        encoded, usage = by_grpc(stack, rate)
        told = cost(article)
        assert told["Prompt tokens"] == str(usage.prompt_tokens_full)
        assert told["After pruning"] == str(usage.prompt_tokens)
        bar = article.get_by_label("Stages of the time to the first token").locator("span")
        colours = bar.evaluate_all("(spans) => spans.map((span) => getComputedStyle(span).backgroundColor)")
        assert len(colours) > 3
        assert "rgba(0, 0, 0, 0)" not in colours
        grid = encoded.plan.grid
        pruned = np.ones(grid.tokens)
        pruned[encoded.kept] = 0
        dark = [canvas.evaluate(DARK) for canvas in article.locator("canvas").all()]
        assert dark == pytest.approx(pruned.reshape(grid.t, -1).mean(axis=1), abs=0.02)
        # The text was written in several pieces, at different times.
        assert len(set(article.evaluate("(article) => article.timesMs"))) > 1


def test_two_answers_begin_with_the_clip_encoded_and_are_laid_out_alike(page: Page) -> None:
    drop(page, "new.mp4", "video/mp4", media.clip(12, fps=3))  # which no other test sends
    page.get_by_label("Method").select_option("evs")  # after the tower: both answers need the same embeddings
    page.get_by_label("Compare with another rate").check()
    ask(page, "What moves?")
    for article in finished(page, 2):
        spans = article.get_by_label("Stages of the time to the first token").locator("span")
        stages = {title.split(":")[0] for title in spans.evaluate_all("(spans) => spans.map(({ title }) => title)")}
        assert "prefill" in stages
        assert not stages & {"decode", "resize", "encode"}
        assert cost(article)["From the cache"] == "0"
    for width in (1280, 800, NARROW_PX):
        page.set_viewport_size({"width": width, "height": 800})
        for article in page.locator("article").all():
            tops = article.locator("dt").evaluate_all("(names) => names.map((one) => one.getBoundingClientRect().top)")
            assert len({round(top) for top in tops}) in (1, len(tops))
        middles = [middle(page.locator(place)) for place in ("#compare", ".check:has(#compare)")]
        assert middles[0] == pytest.approx(middles[1], abs=1)


def middle(place: Locator) -> float:
    box = place.bounding_box()
    assert box
    return box["y"] + box["height"] / 2


def by_grpc(stack: Stack, rate: float, threshold: float | None = None) -> tuple[Encoded, Usage]:
    async def asked() -> tuple[Encoded, Usage]:
        pruning = Pruning(rate, PIXEL_CHANGE, threshold=threshold)
        (encoded,) = await encode(stack.addresses["encoder"], CLIP, pruning)
        async with FramesieveClient(stack.address) as client:
            answer = await client.ask(Video(CLIP, pruning=pruning), "What moves?", max_new_tokens=1)
        return encoded, answer.usage

    with ThreadPoolExecutor(1) as thread:  # Playwright's event loop runs in this one
        return thread.submit(asyncio.run, asked()).result()


def test_an_automatic_rate_is_told_with_the_answer(page: Page, stack: Stack) -> None:
    drop(page, "clip.mp4", "video/mp4", CLIP.read_bytes())
    page.get_by_label("Automatic").check()
    expect(page.get_by_label("Pruning rate")).to_be_disabled()
    page.get_by_label("Compare with another rate").check()
    ask(page, "What moves?")
    _, article = finished(page, 2)
    encoded, usage = by_grpc(stack, 0.0, AUTO_THRESHOLD)
    (item,) = usage.media
    dropped = f"{100 * (item.grid.tokens - item.num_kept) / item.grid.tokens:.0f} %"
    assert encoded.kept.size == item.num_kept < item.grid.tokens
    expect(article.get_by_role("heading")).to_have_text(f"Pruned automatically, by {dropped}")
    kept = f"{item.num_kept} of {item.grid.tokens} visual tokens kept, the others ({dropped}) are dimmed."
    expect(article.locator(".kept figcaption")).to_have_text(kept)


def test_the_methods_are_those_of_the_contract(page: Page) -> None:
    values = page.get_by_label("Method").locator("option").evaluate_all("(options) => options.map((one) => one.value)")
    assert sorted(values) == sorted(set(METHODS) - {NONE})


def test_files_that_are_no_clip_are_refused_where_they_were_dropped(page: Page) -> None:
    error = page.get_by_label("Clip", exact=True).get_by_role("alert")
    drop(page, "notes.txt", "text/plain", b"What moves?")
    expect(error).to_have_text("notes.txt is neither a video nor an image.")
    drop(page, "broken.mp4", "video/mp4", CLIP.read_bytes()[:1000])
    ask(page, "What moves?")
    expect(error).to_contain_text("broken.mp4 cannot be read", timeout=ANSWER_MS)
    expect(page.locator("article")).to_have_count(0)


def test_it_is_usable_by_keyboard_on_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": NARROW_PX, "height": 800})
    page.get_by_role("button", name="Use the demo's clip").press("Enter")
    expect(page.locator("#file-name")).to_contain_text("demo.mp4")
    page.get_by_label("Pruning rate").press("ArrowRight")
    page.get_by_label("Longest answer").fill("4")
    page.get_by_label("Question").fill("What moves?")
    page.get_by_role("button", name="Ask").press("Enter")
    expect(page.locator("#model")).to_have_text(f"Model: {SERVED_NAME}")
    (article,) = finished(page, 1)
    expect(article.get_by_role("heading")).to_have_text("Pruned by 80 %")
    assert page.evaluate("document.documentElement.scrollWidth") == NARROW_PX
