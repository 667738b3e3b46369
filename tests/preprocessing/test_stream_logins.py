"""Passwords of streams: in their URLs and in the operator's file, and to whom they are sent by HTTP."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from gridsieve.common.contract.errors import StartupError
from gridsieve.services.preprocessing.fetch import login as logins
from gridsieve.services.preprocessing.fetch.fetcher import Fetcher
from tests.preprocessing.media_server import (
    MULTIPART,
    Resolver,
    forever,
    head,
    jpeg,
    part_of,
    policy,
    redirect,
    serving,
)
from tests.preprocessing.service import Service, refused
from tests.preprocessing.test_watch import all_of, opened

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("machine a login b password S3cret nonsense", "line 1, is not in netrc's format"),
        ("default login b password S3cret", "must not have a default: every host would be told it"),
        ("machine a login b:c password S3cret", "a user name with a colon"),
        (None, "cannot be read: No such file"),
    ],
)
async def test_files_of_passwords_that_cannot_be_used_end_the_start(tmp_path: Path, text: str | None, why: str) -> None:
    if text is not None:
        (tmp_path / "netrc").write_text(text)
    with pytest.raises(StartupError, match=why) as refusal:
        logins.logins_of(tmp_path / "netrc")
    assert "S3cret" not in str(refusal.value)


@pytest.mark.parametrize("scheme", ["Basic", "Digest", "Digest nonsense"])
async def test_pictures_by_http_may_ask_for_a_password(service: Service, scheme: str) -> None:
    asked: list[str] = []
    left = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        sent = re.search(r"(?i)authorization: (.*)\r", server.requests[-1])
        asked.append(sent[1] if sent else "")
        if not sent:
            challenges = [f'WWW-Authenticate: {scheme} realm="cameras", nonce="n0nce", qop="auth"']
            if "nonsense" in scheme:
                challenges.append('WWW-Authenticate: Basic realm="cameras"')
            writer.write(head(401, *challenges, "Content-Length: 999999"))
            try:
                await forever(writer, b" ", every_s=0.01)
            finally:
                left.set()
        await left.wait()
        writer.write(head(200, MULTIPART) + b"".join(part_of(jpeg(number)) for number in range(3)))

    async with serving(answer) as server, service.serving(server) as stub:
        watched = await all_of(await opened(stub, f"http://us%20er:p%40ss@clip.test:{server.port}/x?y=1"))
        assert watched.frames
    first, second = asked
    assert not first
    if scheme != "Digest":
        assert second == f"Basic {base64.b64encode(b'us er:p@ss').decode()}"
        return
    given = dict(re.findall(r'(\w+)="?([^",]*)', second))
    # RFC 7616, 3.4.1
    secret, asked_for = (hashlib.md5(each).hexdigest() for each in (b"us er:cameras:p@ss", b"GET:/x?y=1"))
    whole = f"{secret}:n0nce:{given['nc']}:{given['cnonce']}:auth:{asked_for}"
    assert given["response"] == hashlib.md5(whole.encode()).hexdigest()


async def test_a_challenge_that_cannot_be_answered_refuses_the_stream(service: Service) -> None:
    refusal = head(401, "WWW-Authenticate: Digest nonsense", "Content-Length: 0")
    async with serving(refusal) as server, service.serving(server) as stub:
        for password, why in (
            ("word", "was answered with status 401, only 200 is accepted"),
            ("w%FFrd", "has a user name or a password that is not UTF-8, percent-encoded"),
        ):
            url = f"http://user:{password}@clip.test:{server.port}/"
            code, _, text = await refused((await opened(stub, url)).call)
            assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, f"open.url {why}")


async def test_a_redirect_to_another_host_gets_no_password(service: Service) -> None:
    challenge = 'WWW-Authenticate: Basic realm="cameras"'
    async with serving(head(401, challenge, "Content-Length: 0")) as other:

        async def answer(writer: asyncio.StreamWriter) -> None:
            writer.write(redirect(f"http://clip.test:{other.port}/"))

        async with serving(answer) as server:
            made = Fetcher(
                replace(policy(server.port), ports=frozenset({server.port, other.port})),
                Resolver(clip_test=[["127.0.0.1"]]),
            )
            async with service.serving(fetcher=made) as stub:
                _, _, text = await refused((await opened(stub, f"http://user:word@clip.test:{server.port}/")).call)
        assert text == "open.url was answered with status 401, only 200 is accepted"
        assert len(other.requests) == 1
        assert "uthorization" not in other.requests[0]
