"""`make fuzz-http`: mutated requests to the gateway before three real services.

A request passes if it ends in time with a status below 500 (or 503, 504), and an error is OpenAI's object whose text
reveals no internals. Afterwards the gateway must answer, and hold no request.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gridsieve.cli.launcher import LocalStack
from gridsieve.client.prompt import Embeds
from gridsieve.common.contract.plan import Grid
from tests import media
from tests.fuzz.rpc_mutations import mutate_bytes
from tests.integration.fleet import exported_at, metric_in
from tests.integration.gateway import brought, data_url, gateway, question

LIMIT_S = 30
_AT_ONCE = 12
_BATCH = 250
_INSIDE = re.compile(r"0x[0-9a-f]{6,}|/work\b|/home\b|site-packages|<\S.* object at|Traceback|\.py\b|pydantic")
_CLIP = media.clip(8)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, "", "x", "\x00", "é\ud800"),
    *("x" * 100_000, [], [[]], {}, {"type": "text"}, {"url": "data:,"}, ["x"] * 1000),
)
_PATHS = ("/v1/chat/completions", "/v1/models", "/v1/files", "/v1/files/file-0", "/health", "/v1/%2e%2e/etc")


@dataclass
class Report:
    ends: Counter[int] = field(default_factory=Counter)  # requests by status
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    method: str
    path: str
    body: bytes
    headers: dict[str, str]


def case(seed: int, number: int) -> Case:
    """The same for the same seed and number."""
    random_ = random.Random(f"{seed}/{number}")
    body = copy.deepcopy(random_.choice(_bodies()))
    for _ in range(random_.choice((0, 1, 1, 1, 2, 4))):
        _change(body, random_)
    if not {"max_tokens", "max_completion_tokens", "max_output_tokens"} & body.keys():
        # Without a limit, an answer may fill the whole context, which takes longer than LIMIT_S on a busy machine.
        body["max_output_tokens" if "input" in body else "max_tokens"] = 8
    sent = json.dumps(body).encode("utf-8", "surrogatepass")
    headers = {"content-type": "application/json"}
    method, path = "POST", "/v1/responses" if "input" in body else "/v1/chat/completions"
    match random_.randrange(12):
        case 0:
            sent = mutate_bytes(sent, random_)
        case 1:
            method, path = random_.choice(("GET", "PUT", "DELETE", "HEAD", "OPTIONS")), random_.choice(_PATHS)
        case 2:
            headers = {random_.choice(("content-type", "authorization", "traceparent", "x-request-id")): "x" * 9000}
        case 3:
            path, boundary = "/v1/files", b"b" * random_.randrange(1, 80)
            sent = b"--" + boundary + b'\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' + _CLIP
            sent = mutate_bytes(sent + b"\r\n--" + boundary + b"--\r\n", random_)
            headers = {"content-type": f"multipart/form-data; boundary={boundary.decode()}"}
    return Case(method, path, sent, headers)


def _bodies() -> list[dict[str, Any]]:
    video = {"type": "video_url", "video_url": {"url": data_url("video/mp4", _CLIP)}, "pruning": {"rate": 0.5}}
    image = {"type": "image_url", "image_url": {"url": data_url("image/png", media.picture(40, 40))}}
    file = {"type": "file", "file": {"file_data": data_url("video/mp4", _CLIP), "filename": "clip.mp4"}}
    embeds = brought(
        "video_embeds", Embeds(bytes(512), Grid(2, 1, 1), dtype="float32", shape=(2, 64), seconds_per_slice=1)
    )
    sampled = {"mm_processor_kwargs": {"fps": 2.0}, "media_io_kwargs": {"video": {"duration": 1.0}}}
    schema = {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"]}
    document = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
    asked = {"role": "user", "content": [{"type": "input_file", "file_data": data_url("video/mp4", _CLIP)}]}
    items = [asked, {"role": "assistant", "content": [{"type": "output_text", "text": "A square."}]}, asked]
    return [
        question("Why?", response_format=document, max_completion_tokens=8),
        question("Why?", n=2, stop=["x"], logprobs=True, top_logprobs=2),
        question(video, "What?", stream=True, stream_options={"include_usage": True}),
        question(video, image, file, "What?", **sampled),
        question(embeds, "What?"),
        {"messages": [{"role": role, "content": "Why?"} for role in ("system", "user")], "max_tokens": 4},
        {"input": items, "text": {"format": {"type": "json_schema", "name": "it", "schema": schema}}, "stream": True},
    ]


def _change(body: Any, random_: random.Random) -> None:
    """Replaces, deletes or adds one value, anywhere."""
    holder, key = random_.choice(list(_places(body)) or [(body, "messages")])
    match random_.randrange(5):
        case 0 if isinstance(holder, dict):
            holder.pop(key, None)
        case 1 if isinstance(holder, dict):
            holder[random_.choice(("x", "temperature", "type", "url", "\x00"))] = copy.deepcopy(random_.choice(_VALUES))
        case 2 if isinstance(holder, list):
            holder.insert(0, copy.deepcopy(holder[key]))
        case 3 if isinstance(holder, dict) and isinstance(holder.get(key), str):
            data = mutate_bytes(holder[key].encode("utf-8", "replace"), random_)
            holder[key] = data.decode("utf-8", "replace")
        case _:
            holder[key] = copy.deepcopy(random_.choice(_VALUES))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _places(value[key])


async def fuzz(url: str, seed: int, numbers: Iterable[int], progress: bool = False) -> Report:
    """Sends the cases with these numbers to a gateway."""
    report, cases = Report(), [(number, case(seed, number)) for number in numbers]
    limits = httpx.Limits(max_connections=_AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, limits=limits) as client:
        for start in range(0, len(cases), _BATCH):
            batch = cases[start : start + _BATCH]
            for (number, sent), fault in zip(
                batch, await asyncio.gather(*(_send(client, each, report) for _, each in batch)), strict=True
            ):
                if fault:
                    report.faults.append(f"case {number} of seed {seed}, {sent.method} {sent.path}: {fault}")
            if progress:
                print(f"{start + len(batch)} of {len(cases)}: {len(report.faults)} faults", flush=True)
        assert (await client.get("/health")).status_code == 200
    running = metric_in(exported_at(f"{url}/metrics"), "gridsieve_requests_running")
    if running:
        report.faults.append(f"{running:g} requests run after all have ended")
    return report


async def _send(client: httpx.AsyncClient, sent: Case, report: Report) -> str | None:
    """What is wrong with the answer."""
    try:
        answer = await client.request(sent.method, sent.path, content=sent.body, headers=sent.headers)
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    report.ends[answer.status_code] += 1
    if answer.status_code >= 500 and answer.status_code not in (503, 504):
        return f"{answer.status_code} {answer.text[:300]}"
    if found := _INSIDE.search(answer.text):
        return f"reveals {found[0]!r}: {answer.text[:300]}"
    if answer.status_code >= 400 and sent.method != "HEAD":
        if answer.text == "Invalid HTTP request received.":  # uvicorn's own, of what is no HTTP
            return None
        try:
            told = answer.json()["error"]
        except (ValueError, KeyError):
            return f"{answer.status_code} {answer.text[:300]}"
        if not (told["message"] and told["code"] and told["type"]):
            return f"an error without a reason: {answer.text[:300]}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, LocalStack() as stack:
        uploads = Path(name, "uploads")
        uploads.mkdir()
        with gateway(stack.address, Path(name), "--upload-root", str(uploads)) as door:
            report = asyncio.run(fuzz(door.url, arguments.seed, range(arguments.count), progress=True))
    print(", ".join(f"{status}: {count}" for status, count in sorted(report.ends.items())))
    for fault in report.faults:
        print(fault)
    print(f"{report.ends.total()} requests, {len(report.faults)} faults")
    sys.exit(bool(report.faults))


if __name__ == "__main__":
    main()
