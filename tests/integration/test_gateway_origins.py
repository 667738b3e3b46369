"""Pages of other origins as clients of the gateway: what browsers ask first, what pages may read, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Origin

from gridsieve.services.gateway.http.errors import ForbiddenOrigin
from gridsieve.services.gateway.http.origins import Origins
from tests.integration.fleet import Stack
from tests.integration.gateway import Gateway, gateway, question


def test_pages_of_other_origins_need_no_token_for_a_preflight_and_can_read_errors(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("alice 0123456789abcdef\nbob 0123456789abcdeb\n")
    page = {"origin": "https://page.example"}
    alice, bob = ({**page, "authorization": f"Bearer 0123456789abcde{last}"} for last in "fb")
    flags = ["--auth-tokens-file", str(tmp_path / "tokens"), "--cors-origins", page["origin"]]
    flags += ["--max-requests-per-client", "1", "--max-requests", "2"]
    with gateway(stack.address, tmp_path, *flags) as guarded, guarded.http() as client, guarded.http() as other:
        assert [client.get(path).status_code for path in ("/health", "/openapi.json")] == [200, 200]
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        preflight = client.options("/v1/chat/completions", headers={**page, **asked})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-headers"] == "authorization"
        body = question("Why?", max_tokens=1500, ignore_eos=True, stream=True)
        with client.stream("POST", "/v1/chat/completions", json=body, headers=alice) as streamed:
            refused = [other.get(path, headers=page) for path in ("/v1/models", "/nowhere")]
            refused.append(other.get("/v1/models", headers=alice))
            with client.stream("POST", "/v1/chat/completions", json=body, headers=bob) as second:
                refused.append(other.get("/v1/models", headers=alice))
    answers = (preflight, streamed, second, *refused)
    assert [each.status_code for each in answers[1:]] == [200, 200, 401, 404, 429, 429]
    assert refused[0].json()["error"]["type"] == "authentication_error"
    assert refused[0].headers["www-authenticate"] == "Bearer"
    for each, limit in zip(refused[2:], ("--max-requests-per-client is 1", "--max-requests is 2"), strict=True):
        assert limit in each.json()["error"]["message"]
        assert int(each.headers["Retry-After"]) == 1
    assert {each.headers.get("access-control-allow-origin") for each in answers} == {page["origin"]}


def test_a_page_of_another_site_reaches_nothing(http: httpx.Client, door: Gateway) -> None:
    """Not by the gateway's address, and not by a name of its own that resolves to it."""
    rebound = {"host": "evil.example", "origin": "http://evil.example"}
    for page in (rebound, {"host": "evil.example"}, {"origin": "http://localhost:3000"}, {"origin": "null"}):
        simple = page | {"content-type": "text/plain"}  # which browsers send without asking first
        answers = [http.post("/v1/chat/completions", content=json.dumps(question("Why?")), headers=simple)]
        answers += [http.get(path, headers=page) for path in ("/", "/v1/files", "/metrics", "/nowhere")]
        for answer in answers:
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "FORBIDDEN_ORIGIN")
    for host in ("localhost:9", "[::1]:9", "127.1.2.3", "gateway.localhost", f"127.0.0.1:{door.port}"):
        own = {"host": host, "origin": f"http://{host}"}
        assert http.post("/v1/chat/completions", json=question("Why?", max_tokens=1), headers=own).status_code == 200


async def test_a_refused_websocket_has_a_body_and_is_no_error_of_the_log(door: Gateway) -> None:
    for name, path, status, code in (
        ("localhost", "/nowhere", 404, "NOT_FOUND"),
        ("localhost", "/v1/models", 404, "NOT_FOUND"),
        ("localhost", "/v1/realtime?model=other", 404, "NOT_FOUND"),
        ("evil.example", "/v1/realtime", 403, "FORBIDDEN_ORIGIN"),
    ):
        page = {"host": "127.0.0.1", "port": door.port, "origin": Origin(f"http://{name}")}
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://{name}{path}", proxy=None, **page)
        response = refused.value.response
        assert (response.status_code, json.loads(response.body)["error"]["code"]) == (status, code)
    assert not [line for line in door.log.read_text().splitlines() if '"level": "error"' in line]


@pytest.mark.parametrize(
    ("listen", "given", "answered", "refused"),
    [
        ("127.0.0.1:8000", [], ["localhost:80", "127.0.0.2"], ["10.0.0.7", "gpu-1", "localhost.evil.example", "["]),
        ("localhost:8000", ["https://api.example:443"], ["api.example", "API.EXAMPLE.:9"], ["x.api.example"]),
        ("[::1]:8000", [], ["[::1]", "a.localhost."], ["[::2]:8000"]),
        ("0.0.0.0:8000", [], ["10.0.0.7:8000", "[fe80::1]", "gateway.gridsieve:8000", ""], []),
        ("gpu-1:8000", ["http://a:1", "null"], ["gpu-1", "a:2", "10.0.0.7", "localhost"], ["evil.example", "["]),
        ("unix:/door", ["http://a"], ["a", "localhost"], ["evil.example"]),
        ("127.0.0.1:8000", ["*"], ["evil.example"], []),
    ],
)
def test_the_names_of_a_gateway_follow_from_where_it_listens(
    listen: str, given: list[str], answered: list[str], refused: list[str]
) -> None:
    origins = Origins(given, listen)
    for host in answered:
        origins.check({"host": host})
    origins.check({})  # HTTP/1.0
    for host in refused:
        with pytest.raises(ForbiddenOrigin, match="does not answer to the name"):
            origins.check({"host": host})
