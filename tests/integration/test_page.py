"""The page in a real Chromium before the real services: a clip, questions about it, and errors in their place."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser, Locator, Page, Request, expect, sync_playwright

from demo.example import CLIP
from gridsieve import GridsieveClient, Pruning, Video
from gridsieve.client.answer import Usage
from gridsieve.client.encoding import Encoded, encode
from gridsieve.common.contract.retention import AUTO_THRESHOLD, METHODS, NONE, PIXEL_CHANGE
from tests import media
from tests.gridsieve.films import BLUE, GREEN, RED, indexed, write_film
from tests.integration.conftest import SERVED_NAME, another_generation
from tests.integration.fleet import Stack, running
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
# The mean brightness of each token of a drawn frame, whose side is 24 pixels.
OF_TOKENS = """(canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const [columns, rows] = [canvas.width / 24, canvas.height / 24];
  const sums = Array(rows * columns).fill(0);
  for (let at = 0; at < data.length; at += 4) {
    const [x, y] = [(at / 4) % canvas.width, Math.floor(at / 4 / canvas.width)];
    sums[Math.floor(y / 24) * columns + Math.floor(x / 24)] += (data[at] + data[at + 1] + data[at + 2]) / 3 / 24 ** 2;
  }
  return sums;
}"""
MIB = 2**20
# Notes each share of the upload that is shown, and presses the button once, when some was sent.
NOTE_SHARES = """(progress, button) => {
  progress.shares = [];
  new MutationObserver(() => {
    progress.shares.push(progress.value);
    if (progress.value > 0) {
      button?.click();
      button = null;
      progress.wasStopped = true;
    }
  }).observe(progress, { attributes: true, attributeFilter: ["value"] });
}"""
# Whether an element is as wide as it would like to be.
IS_WHOLE = """(element) => {
  const copy = element.cloneNode(true);
  copy.style.cssText = "position: absolute; width: auto";
  element.after(copy);
  const wanted = copy.offsetWidth;
  copy.remove();
  return wanted <= element.offsetWidth;
}"""


@pytest.fixture(scope="module")
def door(drawing_door: Gateway) -> Gateway:
    return drawing_door


@pytest.fixture(scope="module")
def inline_door(stack: Stack, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that takes no uploads, before generation with a default rate."""
    folder, default = tmp_path_factory.mktemp("inline"), ("--pruning-rate", "0.5", "--pruning-method", "evs")
    flags = ("--encoder", stack.addresses["encoder"], "--max-inline-bytes", "1000000")
    with (
        another_generation(stack, tiny_checkpoint, folder, *default) as generation,
        gateway(generation.address, folder, *flags) as started,
    ):
        yield started


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@contextmanager
def opened(browser: Browser, door: Gateway) -> Iterator[Page]:
    """The page, which loads nothing from elsewhere and raises nothing."""
    asked: list[str] = []
    raised: list[str] = []
    with browser.new_context(permissions=["clipboard-read", "clipboard-write"]) as context:
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: raised.append(str(error)))
        page.goto(door.url)
        yield page
    assert not raised
    assert [url for url in asked if not url.startswith((door.url, f"blob:{door.url}", "data:"))] == []


@pytest.fixture
def page(browser: Browser, door: Gateway) -> Iterator[Page]:
    with opened(browser, door) as page:
        yield page


@pytest.fixture
def inline_page(browser: Browser, inline_door: Gateway) -> Iterator[Page]:
    with opened(browser, inline_door) as page:
        yield page


def drop(page: Page, name: str, mime_type: str, data: bytes) -> None:
    page.locator("#drop").evaluate(DROP, [name, mime_type, base64.b64encode(data).decode()])


def ask(page: Page, question: str, longest: int = 16) -> None:
    page.get_by_label("Question").fill(question)
    page.get_by_label("Longest answer").fill(str(longest))
    page.get_by_label("Question").press("Enter")


def finished(page: Page, count: int) -> list[Locator]:
    expect(page.locator("article[aria-busy=false]")).to_have_count(count, timeout=ANSWER_MS)
    return page.locator("article").all()


def cost(article: Locator) -> dict[str, str]:
    return dict(zip(article.locator("dt").all_inner_texts(), article.locator("dd").all_inner_texts(), strict=True))


def test_a_dropped_clip_plays_and_is_answered_at_two_rates(page: Page, stack: Stack) -> None:
    drop(page, "clip.mp4", "video/mp4", CLIP.read_bytes())
    player = page.get_by_label("The clip", exact=True)
    assert player.evaluate("async (video) => { await video.play(); return !video.paused; }")
    page.locator("#answers").evaluate(NOTE_TIMES)
    page.get_by_label("Compare with another rate").check()
    asked: list[Request] = []
    page.on("request", lambda request: asked.append(request) if turns(request) else None)
    ask(page, "What moves?")
    for article, rate, heading in zip(finished(page, 2), (0.0, 0.75), ("Not pruned", "Pruned by 75 %"), strict=True):
        expect(article.get_by_role("heading")).to_have_text(heading)
        expect(article.locator(".text")).not_to_be_empty()
        encoded, usage = by_grpc(stack, rate)
        told = cost(article)
        assert (told["Prompt tokens"], told["From the cache"]) == (str(usage.prompt_tokens_full), "0")
        assert told["After pruning"] == str(usage.prompt_tokens)
        bar = article.get_by_label("Stages of the time to the first token").locator("span")
        colours = bar.evaluate_all("(spans) => spans.map((span) => getComputedStyle(span).backgroundColor)")
        assert len(colours) > 3
        assert "rgba(0, 0, 0, 0)" not in colours
        grid = encoded.plan.grid
        pruned = np.ones(grid.tokens)
        pruned[encoded.kept] = 0
        assert article.locator(".time").all_inner_texts() == [f"{second}.0 s" for second in range(grid.t)]
        dark = [canvas.evaluate(DARK) for canvas in article.locator("canvas").all()]
        assert dark == pytest.approx(pruned.reshape(grid.t, -1).mean(axis=1), abs=0.02)
        # The text was written in several pieces, at different times.
        assert len(set(article.evaluate("(article) => article.timesMs"))) > 1
    for width in (1280, 800, NARROW_PX):
        page.set_viewport_size({"width": width, "height": 800})
        for article in page.locator("article").all():
            tops = article.locator("dt").evaluate_all("(names) => names.map((one) => one.getBoundingClientRect().top)")
            assert len({round(top) for top in tops}) in (1, len(tops))
        middles = [middle(page.locator(place)) for place in ("#compare", ".check:has(#compare)")]
        assert middles[0] == pytest.approx(middles[1], abs=1)
        assert page.get_by_label("Method").evaluate(IS_WHOLE) or width < 1280
    # Compared answers start alike: the clip is read before the first, and neither finds what the other computed.
    assert len(asked) == 3
    with page.expect_request(lambda request: turns(request) == 1):
        ask(page, "What moves?", longest=2)
    assert [cost(article)["From the cache"] for article in finished(page, 2)] == ["0", "0"]
    assert len(asked) == 5


def middle(place: Locator) -> float:
    box = place.bounding_box()
    assert box
    return box["y"] + box["height"] / 2


def by_grpc(stack: Stack, rate: float, threshold: float | None = None) -> tuple[Encoded, Usage]:
    async def asked() -> tuple[Encoded, Usage]:
        pruning = Pruning(rate, PIXEL_CHANGE, threshold=threshold)
        (encoded,) = await encode(stack.addresses["encoder"], CLIP, pruning)
        async with GridsieveClient(stack.address) as client:
            answer = await client.ask(Video(CLIP, pruning=pruning), "What moves?", max_new_tokens=1)
        return encoded, answer.usage

    with ThreadPoolExecutor(1) as thread:  # Playwright's event loop runs in this one
        return thread.submit(asyncio.run, asked()).result()


@pytest.mark.deep  # which frame a browser draws after a seek depends on how busy the machine is
def test_the_attention_of_the_answer_dims_the_kept_tokens(page: Page) -> None:
    drop(page, "clip.mp4", "video/mp4", CLIP.read_bytes())
    ask(page, "What moves?", longest=4)
    (article,) = finished(page, 1)
    plain = [canvas.evaluate(OF_TOKENS) for canvas in article.locator("canvas").all()]
    page.get_by_role("button", name="New conversation").click()
    page.get_by_label("Show what the answer attends to").check()
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "What moves?", longest=4)
    (article,) = finished(page, 1)
    # Asked again, because Chromium does not keep the body of a stream.
    body = {name: value for name, value in asked.value.post_data_json.items() if not name.startswith("stream")}
    told = page.request.post(asked.value.url, data=body).json()["choices"][0]["attention"]
    share = f"{round(100 * (1 - told['text_share']))} % of the answer's attention is on them"
    expect(article.locator(".kept figcaption")).to_contain_text(share)
    weights = np.array(told["media"][0]["weights"]).reshape(len(plain), -1)
    # Nothing is pruned. A token is covered by 80 % of a dark colour, less the root of its share of the greatest weight.
    covered = 0.8 * (1 - np.sqrt(weights / weights.max()))
    drawn = [canvas.evaluate(OF_TOKENS) for canvas in article.locator("canvas").all()]
    np.testing.assert_allclose(drawn, plain + (np.mean((20, 22, 26)) - plain) * covered, atol=4)


def test_an_automatic_rate_is_told_with_the_answer(page: Page, stack: Stack) -> None:
    drop(page, "clip.mp4", "video/mp4", CLIP.read_bytes())
    page.get_by_label("Automatic").check()
    expect(page.get_by_label("Pruning rate")).to_be_disabled()
    page.get_by_label("Compare with another rate").check()
    page.get_by_label("Compared rate").fill("0")
    ask(page, "What moves?")
    unpruned, article = finished(page, 2)
    expect(unpruned.get_by_role("heading")).to_have_text("Not pruned")
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


def test_the_form_begins_with_the_pruning_of_the_service(page: Page, inline_page: Page) -> None:
    for on, rate, method, compared in ((page, "0", PIXEL_CHANGE, "0.75"), (inline_page, "0.5", "evs", "0")):
        expect(on.get_by_label("Pruning rate")).to_have_value(rate)
        expect(on.get_by_label("Method")).to_have_value(method)
        on.get_by_label("Compare with another rate").check()
        expect(on.get_by_label("Compared rate")).to_have_value(compared)


def test_files_that_are_no_clip_are_refused_where_they_were_dropped(page: Page) -> None:
    error = page.get_by_label("Clip", exact=True).get_by_role("alert")
    drop(page, "notes.txt", "text/plain", b"What moves?")
    expect(error).to_contain_text("notes.txt is no video")
    drop(page, "broken.mp4", "video/mp4", CLIP.read_bytes()[:1000])
    expect(error).to_be_hidden()
    ask(page, "What moves?")
    expect(error).to_contain_text("broken.mp4 cannot be read", timeout=ANSWER_MS)
    expect(page.locator("article")).to_have_count(0)


def test_a_clip_that_the_browser_cannot_play_is_answered(page: Page) -> None:
    drop(page, "old.mp4", "video/mp4", media.clip(4, fps=2, codec="mpeg4"))
    expect(page.get_by_text("This browser cannot play old.mp4. The server may still answer.")).to_be_visible()
    expect(page.get_by_label("The clip", exact=True)).to_be_hidden()
    ask(page, "What moves?")
    (article,) = finished(page, 1)
    expect(article.locator("canvas")).to_have_count(2)
    expect(article.locator(".kept figcaption")).to_contain_text("This browser cannot play the clip")


@pytest.fixture(scope="module")
def hearing_door(checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway before a model that takes sounds, with uploads."""
    folder = tmp_path_factory.mktemp("hearing")
    upload = ("--upload-root", str(folder))
    with (
        running(checkpoints("qwen2_5_omni"), flags={"preprocessing": upload}) as hearing,
        gateway(hearing.address, folder, "--encoder", hearing.addresses["encoder"], *upload) as started,
    ):
        yield started


def test_a_model_that_hears_is_asked_about_sounds_and_clips_with_their_sound(
    page: Page, browser: Browser, hearing_door: Gateway, tmp_path: Path
) -> None:
    silent, bell, talk = media.clip(4, fps=2), media.sound(media.chirp(1.2)), tmp_path / "talk.mkv"
    talk.write_bytes(media.with_sound(silent, media.chirp(1.7)))
    drop(page, "bell.wav", "audio/wav", bell)
    expect(page.get_by_text("bell.wav is no video or image.")).to_be_visible()
    expect(page.get_by_label("Hear the sound of the video")).to_be_hidden()
    with opened(browser, hearing_door) as page:
        drop(page, "bell.wav", "audio/wav", bell)
        player = page.get_by_label("The sound", exact=True)
        assert player.evaluate("(sound) => sound.play().then(() => sound.duration)") == pytest.approx(1.2)
        ask(page, "What is heard?", longest=2)
        (article,) = finished(page, 1)
        assert cost(article)["Sound heard"] == "1.2 s"
        expect(article.locator("canvas")).to_have_count(0)
        drop(page, "silent.mp4", "video/mp4", silent)
        page.get_by_label("Hear the sound of the video").check()
        ask(page, "What is heard?", longest=2)
        expect(page.get_by_text("The sound of silent.mp4 is not possible: the file has no sound")).to_be_visible()
        page.locator("#file").set_input_files(talk)
        ask(page, "What is heard?", longest=2)
        (article,) = finished(page, 1)
        assert cost(article)["Sound heard"] == "1.7 s"
        expect(article.locator("canvas")).to_have_count(2)
        page.get_by_role("button", name="Copy as Python").click()
        expect(page.locator("#copied")).to_contain_text("Copied.")
        assert run(tmp_path, sys.executable, "-c", page.evaluate("navigator.clipboard.readText()")).strip()


def test_it_is_usable_by_keyboard_on_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": NARROW_PX, "height": 800})
    page.get_by_role("button", name="Use the demo's clip").press("Enter")
    expect(page.locator("#file-name")).to_contain_text("demo.mp4")
    expect(page.get_by_label("Question")).to_have_value("What moves?")
    page.get_by_label("Longest answer").fill("4")
    page.get_by_label("Compared rate").press("ArrowRight")
    page.get_by_label("Question").press("Shift+Enter")
    page.get_by_label("Question").press("ControlOrMeta+Enter")
    expect(page.locator("#model")).to_have_text(f"Model: {SERVED_NAME}")
    unpruned, pruned = finished(page, 2)
    expect(unpruned.get_by_role("heading")).to_have_text("Not pruned")
    expect(pruned.get_by_role("heading")).to_have_text("Pruned by 76 %")
    expect(page.get_by_label("Question")).to_have_value("What moves?\n")
    assert page.evaluate("document.documentElement.scrollWidth") == NARROW_PX


def test_a_large_clip_is_uploaded_with_progress_that_can_be_stopped(page: Page, tmp_path: Path) -> None:
    upload, progress = page.get_by_label("Upload of the clip"), page.locator("#upload-progress")
    progress.evaluate(NOTE_SHARES, page.locator("#stop-upload").element_handle())
    page.locator("#file").set_input_files(padded(tmp_path / "large.mp4", 128 * MIB))
    expect(progress).to_have_js_property("wasStopped", True)
    expect(upload).to_be_hidden()
    shares = progress.evaluate("(progress) => progress.shares")
    assert 0 < max(shares) < 1
    ask(page, "What moves?")
    expect(upload).to_be_visible()
    (article,) = finished(page, 1)
    expect(article.locator(".text")).not_to_be_empty()
    expect(upload).to_be_hidden()
    again = progress.evaluate("(progress) => progress.shares")[len(shares) :]
    assert again == sorted(again)
    assert again[-1] == 1


def test_a_clip_above_the_limit_is_refused_before_it_is_sent(page: Page, inline_page: Page, tmp_path: Path) -> None:
    for on, size_bytes, limit, remedy in (
        (page, 2**30 + 1, "1,024 MiB", "--upload-max-bytes"),
        (inline_page, 1_500_000, "977 KiB", "--upload-root"),
    ):
        sent: list[str] = []
        on.on("request", lambda request, sent=sent: sent.append(request.method))
        on.locator("#file").set_input_files(padded(tmp_path / "huge.mp4", size_bytes))
        error = on.get_by_label("Clip", exact=True).get_by_role("alert")
        expect(error).to_contain_text(f"this server takes at most {limit} from the page")
        expect(error).to_contain_text(remedy)
        assert "POST" not in sent
        ask(on, "What moves?")
        expect(error).to_have_text("Choose a clip first.")
        assert "POST" not in sent


def padded(path: Path, size_bytes: int) -> Path:
    """A clip with an mp4 box of zeros behind it, which take no room on the disk."""
    clip = media.clip(4, fps=2)
    with path.open("wb") as file:
        file.write(clip + (size_bytes - len(clip)).to_bytes(4, "big") + b"free")
        file.truncate(size_bytes)
    return path


NO_SEEK_ENDS = 'Object.defineProperty(HTMLMediaElement.prototype, "currentTime", { set() {} })'


def test_questions_go_on_in_a_conversation_about_a_clip(page: Page, door: Gateway) -> None:
    with door.http() as http:
        before = uploaded(http)
        drop(page, "clip.mp4", "video/mp4", media.clip(4, fps=2, seed=5))
        ask(page, "What moves?")
        (first,) = finished(page, 1)
        said = first.locator(".text").inner_text().removesuffix(" […]")
        (mine,) = uploaded(http) - before
        http.delete(f"/v1/files/{mine}").raise_for_status()  # as if its time were over
        with page.expect_request(lambda request: turns(request) == 3) as seen:
            ask(page, "And then?")
        second, _ = finished(page, 2)
        assert uploaded(http) - before == {mine}
    asked = seen.value.post_data_json["messages"]
    assert [message["role"] for message in asked] == ["user", "assistant", "user"]
    assert asked[1]["content"].strip() == said.strip()
    expect(second.locator(".asked")).to_have_text("And then?")
    page.get_by_role("button", name="New conversation").click()
    page.evaluate(NO_SEEK_ENDS)
    for question, asked_turns in (("And now?", 1), ("And so?", 3)):  # while the kept tokens of the first are drawn
        with page.expect_request(lambda request, count=asked_turns: turns(request) == count):
            ask(page, question)
        expect(page.locator("article").first.locator(".asked")).to_have_text(question)
        expect(page.locator("article").first.locator(".kept")).to_be_visible(timeout=ANSWER_MS)
    drop(page, "other.mp4", "video/mp4", media.clip(4, fps=2, seed=8))
    finished(page, 2)
    with page.expect_request(lambda request: turns(request) == 1):
        ask(page, "And here?")


def uploaded(http: httpx.Client) -> set[str]:
    return {file["id"] for file in http.get("/v1/files").json()["data"]}


def turns(request: Request) -> int:
    """Of a question; 0 for another request."""
    return len(request.post_data_json["messages"]) if request.url.endswith("/v1/chat/completions") else 0


@pytest.mark.parametrize("takes_uploads", [True, pytest.param(False, marks=pytest.mark.deep)])
def test_a_question_is_copied_for_a_shell_and_for_python(
    request: pytest.FixtureRequest, takes_uploads: bool, tmp_path: Path
) -> None:
    page: Page = request.getfixturevalue("page" if takes_uploads else "inline_page")
    clip = tmp_path / 'it\'s a "clip".mp4'
    clip.write_bytes(media.clip(4, fps=2, seed=6))
    page.get_by_text("Access").click()
    page.get_by_label("Token", exact=True).fill("secret0123456789")
    page.locator("#file").set_input_files(clip)
    page.get_by_label("Pruning rate").fill("0.5")
    ask(page, 'What\'s "moving" for $HOME \\ `date`?', longest=2)
    (article,) = finished(page, 1)
    told = cost(article)
    page.get_by_role("button", name="New conversation").click()
    texts = []
    for name in ("Copy as curl", "Copy as Python"):
        page.get_by_role("button", name=name).click()
        expect(page.locator("#copied")).to_contain_text("Copied.")
        texts.append(page.evaluate("navigator.clipboard.readText()"))
        page.locator("#copied").evaluate("(told) => { told.textContent = ''; }")
    shell, python = texts
    answer = json.loads(run(tmp_path, "sh", "-c", shell))
    tokens, full = answer["usage"]["prompt_tokens"], answer["usage"]["gridsieve"]["prompt_tokens_full"]
    assert (str(full), str(tokens)) == (told["Prompt tokens"], told["After pruning"])
    assert tokens < full
    assert run(tmp_path, sys.executable, "-c", python).strip()


def run(folder: Path, *command: str) -> str:
    environment = os.environ | {"GRIDSIEVE_TOKEN": "secret0123456789"}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_server_that_is_gone_is_named(page: Page, door: Gateway) -> None:
    drop(page, "clip.mp4", "video/mp4", media.clip(4, fps=2))
    page.context.set_offline(True)
    ask(page, "What moves?")
    expect(page.get_by_text(f"The server at {door.url} cannot be reached. Check that it still runs")).to_be_visible()
    page.context.set_offline(False)
    ask(page, "What moves?")
    finished(page, 1)
    expect(page.get_by_text("cannot be reached")).to_be_hidden()


# The times at which a video began and ended to play, after a click.
PLAYED = """(video) => new Promise((done, failed) => {
  let began;
  video.onseeked = () => { began ??= video.currentTime; };
  video.onpause = () => done([began, video.currentTime]);
  video.onerror = () => failed(video.error);
  video.click();
})"""


@pytest.fixture(scope="module")
def films_door(
    stack: Stack, media_root: Path, embeds: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A gateway with the index of a film below the media root, with shots of a second each."""
    folder = media_root / "films"
    write_film(folder / "a.mp4", [(RED, 1), (GREEN, 1), (BLUE, 1), (RED, 1), (BLUE, 1)])
    indexed(folder, embeds)
    log = tmp_path_factory.mktemp("films")
    with gateway(stack.address, log, "--moments", str(folder), "--moments-embedder", embeds) as started:
        yield started
    shutil.rmtree(folder)


def test_a_moment_of_a_film_is_found_played_and_asked_about(browser: Browser, films_door: Gateway) -> None:
    with opened(browser, films_door) as page:
        page.get_by_label("Find in the films").fill("0.1")
        page.get_by_label("Find in the films").press("Enter")
        captions = page.locator("#found figcaption")
        expect(captions).to_have_count(5, timeout=ANSWER_MS)
        assert captions.first.inner_text().strip() == "a.mp4\n1.0 to 2.0 s · 1.000"
        video = page.get_by_role("button", name="Play a.mp4, 1.0 to 2.0 s")
        assert str(video.get_attribute("poster")).startswith("data:image/jpeg")
        began_s, ended_s = video.evaluate(PLAYED)
        assert began_s == pytest.approx(1, abs=0.1)
        assert 2 <= ended_s < 5  # where the moment ends, not the film
        with page.expect_request(lambda request: turns(request) == 1) as seen:
            page.get_by_role("button", name="Ask about the best").click()
        (article,) = finished(page, 1)
        expect(article.locator(".text")).not_to_be_empty()
        expect(article.locator(".asked")).to_have_text("0.1")
        (message,) = seen.value.post_data_json["messages"]
        _, *moments, question = message["content"]
        assert [each["text"][:5] for each in moments[::2]] == ["a.mp4"] * 4
        assert question == {"type": "text", "text": "0.1"}
        expect(captions).to_have_count(4)  # those that the model was shown
        page.get_by_label("Find in the films").fill("no number")
        page.get_by_role("button", name="Find", exact=True).click()
        expect(page.locator("#films-error")).not_to_be_empty(timeout=ANSWER_MS)


def test_a_page_without_films_has_no_search(page: Page) -> None:
    expect(page.locator("#model")).not_to_be_empty()
    expect(page.get_by_label("Find in the films")).to_be_hidden()
