"""A server that speaks OpenAI's HTTP: streamed chat completions with usage.

Source: OpenAI's API reference, "chat completion chunk object"; for video and pruning, docs/http.md.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx

from gridsieve.bench.backend import Cost, Refused
from gridsieve.client.answer import STAGES, Timings, Usage
from gridsieve.client.credentials import Access, credentials_of
from gridsieve.client.prompt import Image, Options, Part, Text
from gridsieve.common.contract.errors import DeadlinePassed, InvalidRequest, PeerContract, Unavailable

_PATH = "/v1/chat/completions"
_DONE = b"[DONE]"


class HttpBackend:
    """base_url: with or without the /v1 that OpenAI's clients have at its end. An async context manager.

    Raises StartupError as `GridsieveClient`.
    """

    def __init__(self, base_url: str, access: Access) -> None:
        self._url = base_url.rstrip("/").removesuffix("/v1")
        credentials = credentials_of(access)
        if self._url.startswith("http://"):
            url = httpx.URL(self._url)
            credentials.check_private(f"{url.host}:{url.port or 80}")
        verify = ssl.create_default_context(cafile=access.get("tls_ca"))
        if (cert := access.get("tls_cert")) is not None:
            verify.load_cert_chain(cert, access.get("tls_key"))
        self._http = httpx.AsyncClient(
            base_url=self._url,
            headers=credentials.metadata,
            verify=verify,
            timeout=None,  # noqa: S113  (a request's deadline is that of its options)
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # a proxy of the environment would be measured, too
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def usual_method(self) -> str | None:
        try:
            answer = await self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise Unavailable(f"no server answers at {self._url}: {error!r}", "gateway") from error
        with suppress(ValueError, KeyError, TypeError, IndexError):
            return str(answer.json()["data"][0]["pruning"]["method"])
        return None

    async def answer(self, parts: tuple[Part, ...], options: Options, arrived: Callable[[int], None]) -> Cost:
        """As of `Backend`. A chunk with text counts as one token, as in `vllm bench serve`."""
        body = await asyncio.to_thread(_body, parts, options)
        usage: dict[str, Any] | None = None
        try:
            async with (
                asyncio.timeout(options.get("timeout_s")),
                self._http.stream("POST", _PATH, content=body, headers={"Content-Type": "application/json"}) as answer,
            ):
                if answer.status_code != httpx.codes.OK:
                    raise _refused(answer.status_code, await answer.aread())
                async for data in _data(answer.aiter_bytes()):
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise _refused(answer.status_code, data)
                    if any(choice["delta"].get("content") for choice in chunk["choices"]):
                        arrived(1)
                    usage = chunk.get("usage") or usage
        except TimeoutError as error:
            raise DeadlinePassed(f"the deadline of {options.get('timeout_s'):g} s passed") from error
        except httpx.ConnectError as error:
            raise Unavailable(f"no server answers at {self._url}: {error}", "gateway") from error
        except httpx.HTTPError as error:
            raise Unavailable(f"the connection to {self._url} broke: {error!r}", "gateway") from error
        except (ValueError, KeyError, TypeError) as error:
            raise PeerContract(f"{self._url} sent a chunk in another form than OpenAI's: {error!r}") from error
        if usage is None:
            raise PeerContract(f"the stream from {self._url} ended without its usage")
        return _cost(usage)


async def _data(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events, of one line each, up to the last."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line.removeprefix(b"data:").strip()) != _DONE:
                yield data


def _body(parts: tuple[Part, ...], options: Options) -> bytes:
    """The JSON of a request. Without pruning it has no field that other servers lack."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": [_content(part) for part in parts]}],
        "max_tokens": options.get("max_new_tokens"),
        "ignore_eos": options.get("ignore_eos", False),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.get("pruning_rate") or options.get("pruning_threshold") is not None:
        pruning = {name: options.get(f"pruning_{name}") for name in ("rate", "method", "threshold")}
        body["pruning"] = {name: value for name, value in pruning.items() if value is not None}
    return json.dumps(body).encode()


def _content(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    name, kind = ("image_url", "image/jpeg") if isinstance(part, Image) else ("video_url", "video/mp4")
    if part.url is not None:
        url = part.url
    elif part.server_path is not None:
        if not part.server_path.startswith("/"):
            raise InvalidRequest(f"--on-server with --base-url needs absolute paths, got {part.server_path!r}")
        url = Path(part.server_path).as_uri()
    else:
        data = Path(part.path).read_bytes() if part.path is not None else part.data or b""
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": name, name: {"url": url}}


def _refused(status: int, body: bytes) -> Refused:
    try:
        error = json.loads(body)["error"]
        return Refused(error["message"], f"HTTP {status}", str(error.get("code") or error.get("type")))
    except (ValueError, KeyError, TypeError):
        return Refused(body[:200].decode(errors="replace"), f"HTTP {status}", "ERROR")


def _cost(usage: dict[str, Any]) -> Cost:
    """prompt_tokens_full is 0 of a server that does not report it."""
    ours = usage.get("gridsieve") or {}
    tokens = Usage(
        prompt_tokens_full=ours.get("prompt_tokens_full", 0),
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        media=(),
        cached_prompt_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )
    if not ours:
        return Cost(tokens, None)
    stages = {f"{name}_s": ours["stages_s"][name] for name in STAGES}
    return Cost(tokens, Timings(ours["time_to_first_token_s"], **stages, generate_s=ours["generate_s"]))
