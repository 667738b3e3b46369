"""Pages of other origins as clients of the gateway: what browsers ask first, and what they may read."""

from __future__ import annotations

from pathlib import Path

from tests.integration.fleet import Stack
from tests.integration.gateway import gateway, question


def test_pages_of_other_origins_need_no_token_for_a_preflight_and_can_read_errors(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("alice 0123456789abcdef\nbob 0123456789abcdeb\n")
    page = {"origin": "https://page.example"}
    alice, bob = ({**page, "authorization": f"Bearer 0123456789abcde{last}"} for last in "fb")
    flags = ["--auth-tokens-file", str(tmp_path / "tokens"), "--cors-origins", page["origin"]]
    flags += ["--max-requests-per-client", "1", "--max-requests", "2"]
    with gateway(stack.address, tmp_path, *flags) as guarded, guarded.http() as client, guarded.http() as other:
        assert client.get("/health").status_code == 200
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
