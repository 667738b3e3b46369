"""/v1/files: uploads are listed, asked about, bounded, and reached by their callers alone."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import httpx
import openai
import pytest

from gridsieve import GridsieveClient, Video
from gridsieve.common.contract.errors import GridsieveError, InvalidRequest, MediaForbidden, MediaRejected
from tests import media
from tests.integration.conftest import UPLOAD_MAX_BYTES
from tests.integration.fleet import Stack
from tests.integration.gateway import Gateway, data_url, gateway, question, video

CLIP, OTHER = media.clip(16, fps=4), media.clip(8, fps=4, seed=1)
CLIP_URL = data_url("video/mp4", CLIP)


def test_the_list_of_files_comes_in_pages(door: Gateway) -> None:
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key="a-caller-of-its-own") as client:
        sent = [
            client.files.create(file=(f"{number}.mp4", bytes([number])), purpose=purpose).id
            for number, purpose in enumerate(("user_data", "vision", "user_data", "user_data", "vision"))
        ]
        assert [each.id for each in client.files.list()] == sent[::-1]
        first = client.files.list(limit=2, order="asc")
        assert (len(first.data), first.has_more) == (2, True)
        assert [each.id for each in first] == sent  # over three pages
        assert [each.id for each in client.files.list(purpose="vision", after=sent[4])] == [sent[1]]
        with pytest.raises(openai.NotFoundError, match="after must be a file of this list"):
            client.files.list(after="file-1")
        for wrong in ({"limit": 0}, {"order": "up"}, {"limits": 1}):
            with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
                client.files.list(extra_query=wrong)
        for each in client.files.list():
            client.files.delete(each.id)


@pytest.fixture
def lone(door: Gateway) -> Iterator[httpx.Client]:
    """A caller whose files no other test sees."""
    with door.http(headers={"authorization": "Bearer a-caller-with-files-of-its-own"}) as client:
        yield client


def test_an_uploaded_file_is_asked_about_until_it_is_deleted(lone: httpx.Client) -> None:
    files = {"file": ("clip.mp4", CLIP)}
    kept = lone.post("/v1/files", files=files, data={"purpose": "user_data"}).raise_for_status().json()
    assert kept["bytes"] == len(CLIP)
    assert kept["expires_at"] > time.time()
    assert [each["id"] for each in lone.get("/v1/files").json()["data"]] == [kept["id"]]
    assert lone.get(f"/v1/files/{kept['id']}").json() == kept
    by_id = question({"type": "file", "file": {"file_id": kept["id"]}}, "What?")
    inline = question(video(CLIP_URL), "What?")
    first, second = (lone.post("/v1/chat/completions", json=body).json() for body in (by_id, inline))
    assert first["choices"] == second["choices"]
    content = [{"type": "input_file", "file_id": kept["id"]}, {"type": "input_text", "text": "What?"}]
    body = {"input": [{"role": "user", "content": content}], "temperature": 0, "max_output_tokens": 8}
    answer = lone.post("/v1/responses", json=body).json()
    assert answer["output"][0]["content"][0]["text"] == first["choices"][0]["message"]["content"]
    content[0]["type"] = "input_video"
    assert lone.post("/v1/responses", json=body).json()["output"][0]["content"] == answer["output"][0]["content"]
    stranger = lone.get(f"/v1/files/{kept['id']}", headers={"authorization": "Bearer somebody-else-0123456789"})
    assert stranger.status_code == 404
    large = lone.post("/v1/files", files={"file": ("big.mp4", bytes(2 * UPLOAD_MAX_BYTES))})
    assert large.status_code == 413
    told = "give larger files as an https URL or a file: path below --media-root"
    assert large.json()["error"]["message"].endswith(f"--upload-max-bytes is {UPLOAD_MAX_BYTES}; {told}")
    assert lone.delete(f"/v1/files/{kept['id']}").json()["deleted"]
    assert lone.post("/v1/chat/completions", json=by_id).status_code == 404
    assert lone.get("/v1/files").json()["data"] == []


def test_uploads_are_bounded_together_while_they_arrive(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "uploads").mkdir()
    disk = ("--upload-root", str(tmp_path / "uploads"), "--upload-disk-bytes", str(UPLOAD_MAX_BYTES))
    head = "POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: 100-continue\r\n"
    form = f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {UPLOAD_MAX_BYTES * 9 // 10}\r\n\r\n"
    with gateway(stack.address, tmp_path, *disk) as door, door.http() as http:

        def sent(number: int, size_bytes: int) -> httpx.Response:
            return http.post("/v1/files", files={"file": ("a.mp4", bytes([number]) * size_bytes)})

        with socket.create_connection(("127.0.0.1", door.port)) as slow:
            slow.sendall((head + form).encode())
            assert b"100 Continue" in slow.recv(1000)
            refused = sent(0, UPLOAD_MAX_BYTES // 5)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "60")
            assert f"--upload-disk-bytes is {UPLOAD_MAX_BYTES}" in refused.json()["error"]["message"]
        deadline = time.monotonic() + 60
        while sent(0, UPLOAD_MAX_BYTES // 5).status_code != 200:
            assert time.monotonic() < deadline
        with ThreadPoolExecutor(16) as threads:
            answers = list(threads.map(sent, range(128), repeat(UPLOAD_MAX_BYTES // 100)))
        assert {answer.status_code for answer in answers} == {200, 429}
        assert sum(each["bytes"] for each in http.get("/v1/files").json()["data"]) <= UPLOAD_MAX_BYTES


async def test_an_upload_is_reached_by_its_id_or_by_both_digests_and_by_no_path(
    client: GridsieveClient, http: httpx.Client, upload_root: Path
) -> None:
    kept = http.post("/v1/files", files={"file": ("clip.mp4", OTHER)}).json()
    owner, digest = hashlib.sha256(b"").hexdigest(), hashlib.sha256(OTHER).hexdigest()
    lies = upload_root / owner / digest
    assert lies.read_bytes() == OTHER
    url = f"upload:{owner}/{digest}"
    for given, status in ((lies.as_uri(), 403), (url, 400)):
        assert http.post("/v1/chat/completions", json=question(video(given), "?")).status_code == status
    assert (await client.ask(Video(url=url), "?", max_new_tokens=1)).usage.media
    wrong: list[tuple[Video, type[GridsieveError], str]] = [
        (Video(server_path=str(lies)), MediaForbidden, "outside --media-root"),
        (Video(url=f"upload:{owner}/{'0' * 64}"), MediaRejected, "cannot be read below --upload-root: No such file"),
        (Video(url=f"{url}.json"), InvalidRequest, "must be upload:, 64 hexadecimal digits"),
        (Video(url=f"upload:../{digest}"), InvalidRequest, "must be upload:, 64 hexadecimal digits"),
        (Video(url=f"upload:{owner}"), InvalidRequest, "must be upload:, 64 hexadecimal digits"),
    ]
    for asked, error, text in wrong:
        with pytest.raises(error, match=text):
            await client.ask(asked, "?", max_new_tokens=1)
    http.delete(f"/v1/files/{kept['id']}")
