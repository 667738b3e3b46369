"""POST /v1/gridsieve/moments: the gateway finds moments of a folder of films, and serves them to who may search."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from gridsieve.services.gateway.http.tickets import VALID_S, Ticket, Tickets
from tests.gridsieve.films import BLUE, GREEN, RED, indexed, write_film
from tests.integration.fleet import metric_in, until
from tests.integration.gateway import Gateway, gateway

PATH = "/v1/gridsieve/moments"
TOKEN = "alice-0123456789-token"
ALICE = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def films(embeds: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of two films, with shots from 0, 2 and 5 s, and from 0 and 3 s."""
    folder = tmp_path_factory.mktemp("films")
    write_film(folder / "a & b #1.mp4", [(RED, 2), (GREEN, 3), (BLUE, 1)])
    write_film(folder / "deep" / "b.mp4", [(BLUE, 3), (RED, 2)])
    indexed(folder, embeds)
    return folder


@pytest.fixture(scope="module")
def door(embeds: str, films: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that demands a token. Its generation, which no test asks, is the embedder."""
    folder = tmp_path_factory.mktemp("door")
    (folder / "tokens").write_text(f"alice {TOKEN}\n")
    flags = ("--auth-tokens-file", str(folder / "tokens"), "--moments", str(films), "--moments-embedder", embeds)
    with gateway(embeds, folder, *flags) as started:
        yield started


@pytest.fixture
def http(door: Gateway) -> Iterator[httpx.Client]:
    with door.http(headers=ALICE) as client:
        yield client


def found(http: httpx.Client, text: str, **fields: Any) -> dict[str, Any]:
    told: dict[str, Any] = http.post(PATH, json={"text": text, **fields}).raise_for_status().json()
    return told


def test_the_nearest_moments_are_told_with_pictures_and_as_parts_of_a_question(http: httpx.Client, films: Path) -> None:
    told = found(http, "0.2", limit=3)
    moments = told["moments"]
    places = [("a & b #1.mp4", 2, 5), ("deep/b.mp4", 3, 5), ("a & b #1.mp4", 0, 2)]
    assert [(each["file"], each["start_s"], each["end_s"]) for each in moments] == places
    assert [each["score"] for each in moments] == pytest.approx([math.cos(angle) for angle in (0, 0.1, 0.2)])
    for each, colour in zip(moments, (GREEN, RED, RED), strict=True):
        kind, _, data = each["picture"].partition(",")
        assert kind == "data:image/jpeg;base64"
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))), np.int16)
        assert pixels.shape == (240, 320, 3)
        assert np.abs(pixels - colour).max() < 12
    texts = [each["text"] for each in told["content"] if each["type"] == "text"]
    assert texts[1:] == [
        "a & b #1.mp4, 0.0 to 2.0 seconds:",
        "a & b #1.mp4, 2.0 to 5.0 seconds:",
        "deep/b.mp4, 3.0 to 5.0 seconds:",
    ]
    assert told["content"][2] == {
        "type": "video_url",
        "video_url": {"url": f"file://{films}/a%20%26%20b%20%231.mp4"},
        "mm_processor_kwargs": {"video_start": 0.0, "video_end": 2.0, "max_frames": 16},
    }


def test_a_film_is_read_in_parts_with_its_address_alone(http: httpx.Client, door: Gateway, films: Path) -> None:
    film = found(http, "0.2", limit=1)["moments"][0]["film"]
    data = (films / "a & b #1.mp4").read_bytes()
    with door.http() as stranger:
        whole = stranger.get(film).raise_for_status()
        part = stranger.get(film, headers={"range": "bytes=100-199"})
    assert (whole.content, whole.headers["content-type"]) == (data, "video/mp4")
    assert (part.status_code, part.content) == (206, data[100:200])
    assert part.headers["content-range"] == f"bytes 100-199/{len(data)}"


async def test_searches_and_films_count_as_requests_of_who_searched(http: httpx.Client, door: Gateway) -> None:
    def tokens() -> float:
        return metric_in(http.get("/metrics").text, "gridsieve_client_tokens_total", client="alice", kind="prompt")

    before = tokens()
    film = found(http, "0.2", limit=1)["moments"][0]["film"]
    assert tokens() - before == 3
    with door.http() as player:
        read = player.get(film, headers={"x-request-id": "playing"}).raise_for_status()
    assert read.headers["cache-control"] == "private"
    await until(lambda: '"playing"' in door.log.read_text())
    (ended,) = [json.loads(line) for line in door.log.read_text().splitlines() if '"playing"' in line]
    assert ended["client"] == "alice"


def test_neither_a_search_nor_a_film_is_for_strangers(http: httpx.Client, door: Gateway) -> None:
    film = found(http, "0.2", limit=1)["moments"][0]["film"]
    before, _, sign = film.rpartition(".")
    forged = base64.urlsafe_b64encode(b'["alice", "../door/tokens", 9e9]').decode().rstrip("=")
    with door.http() as stranger:
        assert stranger.post(PATH, json={"text": "0.2"}).status_code == 401
        for wrong in (before, f"{before}.", f"{PATH}/films/{forged}.{sign}", f"{PATH}/films/é", f"{PATH}/films/.."):
            assert stranger.get(wrong).status_code in (401, 404)
        assert stranger.get(f"{PATH}/films/{forged}.{sign}").json()["error"]["code"] == "UNAUTHENTICATED"


def test_an_address_is_valid_for_an_hour_and_only_at_its_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    tickets = Tickets()
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    written = tickets.written(Ticket("alice", "a.mp4"))
    now_s += VALID_S - 1
    assert tickets.read(written) == Ticket("alice", "a.mp4")
    now_s += 2
    for reader, text in ((tickets, written), (Tickets(), Tickets().written(Ticket("alice", "a.mp4")))):
        with pytest.raises(Exception, match="search again"):
            reader.read(text)


def test_only_files_of_the_folder_are_served(http: httpx.Client, films: Path, tmp_path: Path) -> None:
    """Although the index has them."""
    film = found(http, "0.3", limit=1)["moments"][0]["film"]
    path, aside = films / "deep" / "b.mp4", tmp_path / "b.mp4"
    path.rename(aside)
    try:
        assert http.get(film).status_code == 404
        path.symlink_to(aside)
        assert http.get(film).status_code == 404
    finally:
        path.unlink(missing_ok=True)
        aside.rename(path)
    assert http.get(film).status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "text must be set"),
        ({"text": ""}, "text is wrong"),
        ({"text": "0", "limit": 101}, "limit is wrong"),
        ({"text": "0", "path": "/etc"}, "path is not a field that this service knows"),
    ],
)
def test_wrong_fields_are_named(http: httpx.Client, body: dict[str, Any], words: str) -> None:
    refused = http.post(PATH, json=body)
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"]


def test_a_store_that_fails_is_told_without_its_words(embeds: str, films: Path, tmp_path: Path) -> None:
    """Which name a host and a user."""
    store = f"postgresql://archivist@/films?host={tmp_path}/nobody"
    flags = ("--moments", str(films), "--moments-embedder", embeds, "--moments-store", store)
    with gateway(embeds, tmp_path, *flags) as opened, opened.http() as http:
        refused = http.post(PATH, json={"text": "0"}, headers={"x-request-id": "r7"})
        assert (refused.status_code, refused.json()["error"]["stage"]) == (503, "store")
        assert "the index of --moments cannot be read, request id r7" in refused.json()["error"]["message"]
        assert str(tmp_path) not in refused.text
        assert f"{tmp_path}/nobody" in opened.log.read_text()


def test_what_is_missing_is_told(embeds: str, films: Path, tmp_path: Path) -> None:
    flags: tuple[str, ...] = ("--moments", str(films), "--moments-embedder", f"unix:{tmp_path}/nobody.sock")
    with gateway(embeds, tmp_path, *flags) as lonely, lonely.http() as http:
        away = http.post(PATH, json={"text": "0"})
    assert (away.status_code, away.json()["error"]["stage"]) == (503, "embedder")
    with gateway(embeds, tmp_path) as without, without.http() as http:
        assert http.get("/version").json()["moments"] is False
        assert "without --moments" in http.post(PATH, json={"text": "0"}).json()["error"]["message"]
    (tmp_path / "new").mkdir()
    flags = ("--moments", str(tmp_path / "new"), "--moments-embedder", embeds)
    with gateway(embeds, tmp_path, *flags) as empty, empty.http() as http:
        assert http.get("/version").json()["moments"] is True
        told = http.post(PATH, json={"text": "0"}).json()["error"]["message"]
    assert told == f"{tmp_path}/new has no index; gridsieve index {tmp_path}/new makes it"
