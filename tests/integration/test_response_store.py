"""Stored responses: how many bytes and how long they are kept, and how many bytes one request may take from them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields
from typing import Any

import pytest

from gridsieve.client.answer import Timings, Usage
from gridsieve.services.gateway.http.body import BodyLimit
from gridsieve.services.gateway.http.errors import TooLarge
from gridsieve.services.gateway.responses.earlier import continued
from gridsieve.services.gateway.responses.request import parse
from gridsieve.services.gateway.responses.response import ResponseWriter
from gridsieve.services.gateway.responses.store import RESPONSE_BYTES, STORED_S, ResponseStore, Stored
from tests.gridsieve.instant_loop import run


def test_what_a_request_brings_from_the_store_is_bounded() -> None:
    """However often it names it."""
    item = {"type": "message", "id": "msg_1_0", "role": "assistant", "content": "x" * 1000}
    answered = json.dumps({"output": [item]}).encode()
    reference = {"type": "item_reference", "id": "msg_1_0"}

    def bring(limit_bytes: int, **body: Any) -> int:
        limit = BodyLimit(limit_bytes, "--max-inline-bytes is 3", "upload them")
        return continued(parse(json.dumps({"input": "?"} | body).encode()), store, "alice", limit).stored_bytes

    store = ResponseStore()
    run(kept(store, "resp_1", Stored("alice", None, b'{"input": "Hi"}', answered)))
    assert bring(4000, input=[reference] * 3) == 3 * len(answered)
    with pytest.raises(
        TooLarge, match=r"^input\[3\] needs .* at most 4000 are allowed: --max-inline-bytes is 3; upload"
    ):
        bring(4000, input=[reference] * 4)
    assert bring(4000, previous_response_id="resp_1") > len(answered)
    with pytest.raises(TooLarge, match=r"^previous_response_id needs"):
        bring(2000, previous_response_id="resp_1")


async def kept(store: ResponseStore, response_id: str, response: Stored) -> None:
    assert store.keep(response_id, response)


def stored(size_bytes: int = 0, previous: str | None = None) -> Stored:
    return Stored("alice", previous, bytes(size_bytes), b"")


def test_stored_responses_are_bounded_in_bytes() -> None:
    store = ResponseStore()

    async def fill() -> None:
        assert not store.keep("resp_0", stored(RESPONSE_BYTES))
        for number in range(1, 6):
            assert store.keep(f"resp_{number}", stored(RESPONSE_BYTES - 2**16, "resp_1" if number == 4 else None))
        assert not store.keep("resp_6", stored(previous="resp_2"))

    run(fill())
    # The first is continued by the fourth, so that the second is the one that was not used for the longest time. It is
    # gone when the sixth, which continues it, is answered.
    assert [number for number in range(7) if store.find(f"resp_{number}", "alice")] == [1, 3, 4, 5]
    assert [name for name, _ in store.conversation("resp_4", "alice") or ()] == ["resp_1", "resp_4"]


def test_stored_responses_end_an_hour_after_the_last_that_continues_them() -> None:
    store = ResponseStore()

    async def wait() -> None:
        store.keep("resp_1", stored())
        store.keep("resp_2", stored())
        await asyncio.sleep(STORED_S / 2)
        store.keep("resp_3", stored(previous="resp_1"))
        await asyncio.sleep(STORED_S / 2 + 1)
        assert [number for number in (1, 2, 3) if store.find(f"resp_{number}", "alice")] == [1, 3]
        await asyncio.sleep(STORED_S / 2)
        assert not [number for number in (1, 2, 3) if store.find(f"resp_{number}", "alice")]
        assert store.keep("resp_4", stored())

    run(wait())


def test_a_response_that_the_store_does_not_take_says_so() -> None:
    told = ResponseWriter({}, "scripted", lambda told: False)
    (last,) = told.end(Usage(1, 1, 1, ()), Timings(*[0.0] * len(fields(Timings))))
    assert json.loads(last["data"])["response"]["store"] is False
