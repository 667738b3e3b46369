"""The synchronous client against a hand-written server."""

from __future__ import annotations

import threading

import pytest

from gridsieve.client.answer import Accepted, Delta
from gridsieve.common.contract import errors
from gridsieve.sync import GridsieveClient
from tests.gridsieve.fake_services import FakeServices


def test_it_asks_streams_and_raises_as_the_asyncio_client(address: str, services: FakeServices, clip: str) -> None:
    with GridsieveClient(address) as client:
        assert client.ask(clip, "What moves?").text == "A red ball ⚽"
        events = list(client.stream(clip, "What moves?"))
        assert isinstance(events[0], Accepted)
        assert "".join(event.text for event in events if isinstance(event, Delta)) == "A red ball ⚽"
        with pytest.raises(errors.MediaDamaged, match="12 of 40"):
            client.ask(clip, "refuse")
        services.refusal = errors.InvalidRequest(field="sampling.top_p", limit="at most 1", value=2.0)
        with pytest.raises(errors.InvalidRequest, match=r"^sampling\.top_p must be at most 1, got 2\.0$") as caught:
            client.ask(clip, "refuse")
        told = caught.value
        assert (told.field, told.value, told.limit, told.remedy) == ("sampling.top_p", "2.0", "at most 1", None)


def test_leaving_a_stream_cancels_its_request(address: str, services: FakeServices, clip: str) -> None:
    with GridsieveClient(address) as client:
        for event in client.stream(clip, "hang"):
            if isinstance(event, Delta):
                break
        assert services.cancelled.wait(20)


def test_an_unusable_address_is_refused_and_leaves_no_thread() -> None:
    with pytest.raises(errors.StartupError, match="must end with a port"):
        GridsieveClient("127.0.0.1")
    assert "gridsieve client" not in [thread.name for thread in threading.enumerate()]
