"""`gridsieve bench --base-url` against a server that knows nothing of gridsieve: what is sent, what is read."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

TOKEN = "0123456789abcdef"
USAGE = {"prompt_tokens": 30, "completion_tokens": 3, "total_tokens": 33}


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()


class Handler(BaseHTTPRequestHandler):
    """Streams three tokens, one of them with a separator that is no end of a line for server-sent events."""

    server: Server

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        self.server.tokens.add(self.headers["Authorization"])
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()
        chunks = [{"choices": [{"delta": {"content": text}}]} for text in ("", "A", " \u2028", "B")]
        for chunk in (*chunks, {"choices": [], "usage": USAGE}):
            self.wfile.write(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_another_server_gets_openais_fields_and_is_measured(
    server: Server, gridsieve: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRIDSIEVE_TOKEN", TOKEN)
    turns = [{"from": "human", "value": "<video>\nWhat moves?"}, {"from": "gpt", "value": "A."}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"conversations": turns, "video": "/media/a clip.mp4"}]))
    load = ("--requests", "2", "--warmup", "0", "--workload", str(path), "--on-server", "--max-new-tokens", "9")
    rates = ("--pruning-rate", "0", "--pruning-rate", "0.5")
    asked = ("bench", "--base-url", f"http://localhost:{server.server_port}/v1", *load, *rates)
    untold = gridsieve(*asked)
    assert (untold.exit_code, server.bodies) == (2, [])
    assert "--pruning-rate needs --method" in untold.stderr
    result = gridsieve(*asked, "--method", "evs", "--json")
    assert result.exit_code == 0, result.output
    video = {"type": "video_url", "video_url": {"url": "file:///media/a%20clip.mp4"}}
    plain = {
        "messages": [{"role": "user", "content": [video, {"type": "text", "text": "What moves?"}]}],
        "max_tokens": 9,
        "ignore_eos": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pruned = {**plain, "pruning": {"rate": 0.5, "method": "evs"}}
    assert server.bodies == [plain, plain, pruned, pruned]
    assert server.tokens == {f"Bearer {TOKEN}"}
    told = json.loads(result.stdout)
    load, _ = told["by_pruning"]
    assert (load["answered"], load["prompt_tokens"], load["completion_tokens"]) == (2, 60, 6)
    assert (load["retained"], load["stages_s"], load["held_s"]) == (None, {}, None)
    assert load["first_token_s"]["mean"] <= load["total_s"]["mean"]
    assert load["time_per_output_token_s"]["max"] > 0


def test_a_token_is_not_sent_to_another_machine_in_plain_text(
    gridsieve: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRIDSIEVE_TOKEN", TOKEN)
    result = gridsieve("bench", "--base-url", "http://192.0.2.1")
    assert result.exit_code == 1
    assert "the token would be sent to 192.0.2.1:80 in plain text" in result.stderr
