"""The encoder behind a hostile peer, which sends any bytes and any status: it answers and serves on.

Generation reads its peers by the same code; what it checks itself is in `generation/test_media.py`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.channels import MAX_RECEIVE_BYTES, error_from_status, open_channel
from gridsieve.common.contract import errors
from gridsieve.common.contract.errors import GridsieveError
from gridsieve.common.serving.status import DETAILS_KEY
from gridsieve.services.encoder.items.batcher import Batcher
from gridsieve.services.encoder.items.cache import EmbedsCache
from gridsieve.services.encoder.rpc.servicer import EncoderServicer
from gridsieve.services.encoder.tower.parallel.tower import packing_of
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.v1 import prompt_pb2, tensor_pb2
from gridsieve.v1.encoder_pb2_grpc import EncoderServiceStub
from gridsieve.v1.preprocessing_pb2 import PreprocessResponse
from tests.common.loopback import TIMEOUT_S, serving, speaking
from tests.encoder.encoder_peers import FINGERPRINT, VIDEO
from tests.encoder.encoder_service import SELECT_ALL, first_request

Behaviour = Callable[[Any, Any], AsyncIterator[bytes]]
# Opens a call to the service under test, which calls the peer.
Ask = Callable[[], Any]
Behind = Callable[[Behaviour], AbstractAsyncContextManager[Ask]]


@pytest.fixture
def behind(tmp_path: Path, tower: Tower) -> Behind:
    """Runs the encoder behind a peer with the given behaviour."""
    address = f"unix:{tmp_path}/peer"

    @asynccontextmanager
    async def opened(behaviour: Behaviour) -> AsyncIterator[Ask]:
        batcher, room = Batcher(tower.encode, packing_of(tower, 64)), ByteSemaphore(2**20)
        cache = EmbedsCache(tower, batcher, room, 0)
        batcher.start()
        async with (
            speaking(address, {"/gridsieve.v1.PreprocessingService/Preprocess": behaviour}),
            open_channel(address) as upstream,
            serving(
                f"unix:{tmp_path}/e", EncoderServicer(FINGERPRINT, cache, ByteSemaphore(2**20), upstream)
            ) as channel,
        ):
            stub = EncoderServiceStub(channel)
            yield lambda: stub.Encode(iter([first_request([VIDEO]), SELECT_ALL]), timeout=TIMEOUT_S)
            assert room.held_bytes == 0
        batcher.close()

    return opened


def saying(*messages: bytes) -> Behaviour:
    async def behaviour(requests: Any, context: Any) -> AsyncIterator[bytes]:
        await context.read()
        for message in messages:
            yield message

    return behaviour


def ending(code: grpc.StatusCode, words: str, details: bytes | None = None) -> Behaviour:
    async def behaviour(requests: Any, context: Any) -> AsyncIterator[bytes]:
        await context.read()
        await context.abort(code, words, ((DETAILS_KEY, details),) if details is not None else ())
        yield b""

    return behaviour


async def error_of(call: Any) -> GridsieveError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return error_from_status(caught.value, "service")


EMPTY_PIECE = prompt_pb2.PromptPlan(layout=tensor_pb2.TensorChunk(dtype=tensor_pb2.DTYPE_INT32, shape=[4, 1000]))
MALFORMED = {
    "not protobuf": b"\xff" * 40,
    "a message too large": bytes(MAX_RECEIVE_BYTES + 1),
    "an empty message": b"",
    "frames before a plan": b"\x12\x00",
    "a plan in empty pieces": PreprocessResponse(plan=EMPTY_PIECE).SerializeToString(),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_answers_break_the_contract(behind: Behind, name: str) -> None:
    async with behind(saying(*[MALFORMED[name]] * 3)) as ask:
        for _ in range(2):
            error = await error_of(ask())
            assert type(error) is errors.PeerContract
            assert re.fullmatch(r"a peer of Encode broke the contract, request id \w+", str(error))


@pytest.mark.parametrize("code", [grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE])
async def test_a_peers_error_text_is_not_passed_on(behind: Behind, code: grpc.StatusCode) -> None:
    async with behind(ending(code, "Traceback: /srv/app/wire.py <Tensor object at 0x7f2a9c0d1e50>")) as ask:
        error = await error_of(ask())
    assert re.fullmatch(r"preprocessing (failed|cannot be reached)", str(error))
    assert isinstance(error, errors.Unavailable) == (code is grpc.StatusCode.UNAVAILABLE)


def forged(seconds: int = 0, nanos: int = 0) -> bytes:
    """Details of an overload with RetryInfo of this delay, or for 0 with an undecodable detail."""
    status = status_pb2.Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="full")
    status.details.add().Pack(
        error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=seconds, nanos=nanos))
    )
    if not seconds:
        status.details[0].CopyFrom(any_pb2.Any(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff"))
    return status.SerializeToString()


@pytest.mark.parametrize(
    ("details", "retry_after_s"),
    [(b"\xff" * 20, 1), (forged(), 1), (forged(-5), 1), (forged(2**62, -(2**31)), 60), (forged(3), 3)],
)
async def test_a_status_survives_forged_details(behind: Behind, details: bytes, retry_after_s: float) -> None:
    async with behind(ending(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", details)) as ask:
        error = await error_of(ask())
    assert isinstance(error, errors.Overloaded)
    assert (str(error), error.retry_after_s) == ("full", retry_after_s)


async def test_the_address_of_an_absent_peer_is_not_disclosed(behind: Behind, tmp_path: Path) -> None:
    async with behind(saying()) as ask:
        (tmp_path / "peer").rename(tmp_path / "gone")
        error = await error_of(ask())
    assert re.fullmatch(r"preprocessing cannot be reached", str(error))
