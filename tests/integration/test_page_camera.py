"""The page asks about what a camera sees, in a browser with a fake camera."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from playwright.async_api import async_playwright, expect

from tests.integration.fleet import Stack
from tests.integration.gateway import gateway
from tests.integration.realtime import (
    ANSWER_MS,
    TOKEN,
)


async def test_the_page_asks_about_what_the_camera_sees(live_stack: Stack, tmp_path: Path, chromium: str) -> None:
    (tmp_path / "tokens").write_text(f"alice {TOKEN}\n")
    raised: list[str] = []
    arguments = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with gateway(live_stack.address, tmp_path, "--auth-tokens-file", str(tmp_path / "tokens")) as guarded:
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=chromium, args=arguments)
            page = await browser.new_page()
            page.on("pageerror", lambda error: raised.append(str(error)))
            await page.goto(guarded.url)
            camera = page.locator("#camera")
            await camera.click()
            await expect(page.locator("#token-error")).to_contain_text("bearer token")
            await expect(camera).to_have_text("Use the camera")
            await page.locator("#token").fill("a(token)")
            await camera.click()
            await expect(page.locator("#question-error")).to_contain_text("subprotocol")
            await page.locator("#token").fill(TOKEN)
            await camera.click()
            seen = page.locator("article.live")
            await expect(seen.locator("canvas")).to_be_visible(timeout=ANSWER_MS)
            names = ("rate", "automatic", "method", "compare", "curl", "python")
            of_clips = [page.locator(f"#{name}") for name in names]
            for each in of_clips:
                await expect(each).to_be_disabled()
            for number in (1, 2):
                await page.get_by_label("Question").fill(f"What moves? {number}")
                await page.get_by_label("Longest answer").fill("8")
                await page.get_by_role("button", name="Ask").click()
                answers = page.locator("article:not(.live)")
                await expect(page.locator("article:not(.live)[aria-busy=false]")).to_have_count(
                    number, timeout=ANSWER_MS
                )
                await expect(answers.first.locator("h2")).to_have_text(f"What moves? {number}")
                await expect(answers.first.locator(".text")).not_to_be_empty()
                await expect(answers.first.locator("dt").first).to_have_text("Prompt tokens")
            # What does not change in the fake camera's picture is dimmed.
            some = re.compile(r"^(\d+) of (?!\1 )\d+ visual tokens are new")
            await expect(seen.locator(".kept figcaption")).to_have_text(some, timeout=ANSWER_MS)
            full, kept = [int(await seen.locator("dd").nth(place).inner_text()) for place in (2, 3)]
            assert 0 < kept < full
            track = await page.evaluate_handle("document.getElementById('player').srcObject.getTracks()[0]")
            await camera.click()
            await expect(camera).to_have_text("Use the camera")
            assert await track.evaluate("track => track.readyState") == "ended"
            await expect(page.locator("#question-error")).to_be_empty()
            for each in of_clips:
                await expect(each).to_be_enabled()
            await browser.close()
        assert not raised
        while await asyncio.to_thread(live_stack.services["generation"].in_use):
            await asyncio.sleep(0.05)
