"""A gateway that answers as the text of a question says, and records what it was asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USAGE = {"prompt_tokens": 10, "completion_tokens": 3}
WRONG = {"error": {"message": "temperature must be at least 0, got -1", "type": "invalid_request_error"}}


class FakeGateway:
    """asked, headers: of questions, in order of arrival.

    hangs: set once a question "hang" has come; it is answered when `goes_on` is set.
    """

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.headers: list[Any] = []
        self.hangs, self.goes_on = threading.Event(), threading.Event()

    @property
    def questions(self) -> list[str]:
        return [question_in(body) for body in self.asked]

    def answer(self, body: Any, headers: Any) -> tuple[int, Any]:
        self.headers.append(dict(headers))
        self.asked.append(body)
        return self._said(question_in(body))

    def _said(self, question: str) -> tuple[int, Any]:
        match question.split():
            case ["wrong"]:
                return 400, WRONG
            case ["hang"]:
                self.hangs.set()
                self.goes_on.wait(30)
            case ["after", seconds]:
                time.sleep(float(seconds))
            case ["status", status]:
                return int(status), {"error": {"message": f"it is {status}"}}
        return 200, {"choices": [{"message": {"content": question}}], "usage": USAGE}


def question_in(body: Any) -> str:
    """The text of the last message, or of its last part."""
    content = body["messages"][-1]["content"]
    return str(content if isinstance(content, str) else content[-1]["text"])


@contextmanager
def serving(gateway: FakeGateway) -> Iterator[str]:
    """Yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, {"object": "list", "data": []})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._send(*gateway.answer(body, self.headers))

        def log_message(self, *_: object) -> None: ...

        def _send(self, status: int, told: Any) -> None:
            data = json.dumps(told).encode()
            self.send_response(status)
            for name, value in (("content-length", str(len(data))), ("x-request-id", "r1"), ("retry-after", "0")):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    class Server(ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

        def handle_error(self, *_: object) -> None: ...  # of clients that have left

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            gateway.goes_on.set()
            server.shutdown()
            thread.join()
