"""What clients of the gateway are told when its grace period ends before their requests do."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from pathlib import Path

import httpx

from gridsieve.common.process import ExitStatus
from tests.integration.fleet import Stack, metric_in, until
from tests.integration.gateway import gateway, question

ERROR = {
    "message": "gateway is draining, and its grace period is over",
    "type": "service_unavailable_error",
    "param": None,
    "code": "UNAVAILABLE",
    "stage": "gateway",
}


async def test_a_drain_tells_the_clients_that_it_cuts_off(stack: Stack, tmp_path: Path) -> None:
    path, body = "/v1/chat/completions", question("Why?", max_tokens=1500, ignore_eos=True)
    with gateway(stack.address, tmp_path, "--drain-s", "0.2") as leaving:
        reader, writer = await asyncio.open_connection("127.0.0.1", leaving.port)
        writer.write(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n".encode())  # and no body
        async with httpx.AsyncClient(base_url=leaving.url, timeout=60) as client:
            asking = asyncio.create_task(client.post(path, json=body))
            async with client.stream("POST", path, json={**body, "stream": True}) as streamed:
                lines = streamed.aiter_lines()
                await anext(lines)
                running = "gridsieve_requests_running"
                await until(lambda: metric_in(httpx.get(f"{leaving.url}/metrics").text, running) == 3)
                leaving.process.send_signal(signal.SIGTERM)
                told = [line async for line in lines if line]
            whole = await asking
        assert json.loads(told[-1].removeprefix("data: ")) == {"error": ERROR}
        assert (whole.status_code, whole.json()) == (503, {"error": ERROR})
        assert "Retry-After" in whole.headers
        late = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        assert late.startswith(b"HTTP/1.1 503 ")
        assert json.loads(late.partition(b"\r\n\r\n")[2]) == {"error": ERROR}
        assert await asyncio.to_thread(leaving.process.wait, 20) == ExitStatus.CUT_OFF
    ends = Counter(line["code"] for line in map(json.loads, leaving.log.read_text().splitlines()) if "code" in line)
    assert ends == {"UNAVAILABLE": 3}
