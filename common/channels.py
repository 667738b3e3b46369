"""Channels to other services, and what their errors mean here.

A call carries the caller's deadline and request id on; an error that is the caller's own fault passes through.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import Any

import grpc
import structlog
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from common.contract.errors import (
    DeadlinePassed,
    FramesieveError,
    InvalidRequest,
    MediaDamaged,
    MediaForbidden,
    MediaRejected,
    Overloaded,
    PeerContract,
    PromptTooLong,
    StartupError,
    Unauthenticated,
    Unavailable,
)
from common.security.credentials import NO_CREDENTIALS, Credentials
from common.telemetry.tracing import passed_on_trace

REQUEST_ID_KEY = "x-request-id"
DETAILS_KEY = "grpc-status-details-bin"
ERROR_DOMAIN = "framesieve"

# Of an error's text. It is sent twice, once percent-encoded, and headers above 8 KiB are refused by the receiver,
# which would tell the caller of a resource that is exhausted.
MAX_MESSAGE_BYTES = 1500

# Of a request: a prompt's inline media is at most 16 MiB, its text 4 MiB.
MAX_RECEIVE_BYTES = 20 * 2**20
# Of an answer: a piece of an array is at most 2 MiB and a plan's first 1 MiB, with 512 media of 11 KiB each beside it.
MAX_ANSWER_BYTES = 8 * 2**20

# What the environment says of proxies is for the web: one would be shown every call, and its token.
NO_PROXY = ("grpc.enable_http_proxy", 0)

# Of one call, and the mean wait before the second; the wait before the third is twice as long.
ATTEMPTS = 3
BACKOFF_S = 0.1

# Before a call's first answer gRPC begins it again by itself, and of the budget below counts each failure as 1, each
# success as a tenth: a burst of half of it is tried again, then one failure in ten calls. The waits add up to 0.3 s,
# give or take a fifth: who asked hears of a failure within a second.
_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": ""},
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": ATTEMPTS,
                "initialBackoff": f"{BACKOFF_S}s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
    "retryThrottling": {"maxTokens": 400, "tokenRatio": 0.1},
}

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_send_message_length", MAX_RECEIVE_BYTES),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.per_rpc_retry_buffer_size", MAX_RECEIVE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # Twice what listeners forbid, and on calls in which nothing is said as well: some wait minutes for room.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.http2.max_pings_without_data", 0),
    NO_PROXY,
)

_BY_REASON: dict[str, type[FramesieveError]] = {
    leaf.reason: leaf
    for leaf in (
        InvalidRequest,
        PromptTooLong,
        MediaRejected,
        MediaDamaged,
        Unauthenticated,
        MediaForbidden,
        DeadlinePassed,
    )
}
_BY_STATUS: dict[grpc.StatusCode, type[FramesieveError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: MediaForbidden,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlinePassed,
}


def open_channel(address: str, credentials: Credentials = NO_CREDENTIALS) -> grpc.aio.Channel:
    """A channel to every replica that the address names, in turn, but for those whose health is not SERVING.

    address: host:port, for all addresses that the name has, unix:/path, several of either behind commas, or another of
        gRPC's own (dns:///name:port).
    A call that gets UNAVAILABLE before any answer is begun again, elsewhere if there is another. The channel connects
    again within a second once a peer is back. Raises StartupError for a list of names, and where a token would be shown
    to a network.
    """
    tls = credentials.for_channel(address)
    if tls is None:
        return grpc.aio.insecure_channel(_target(address), _OPTIONS)
    return grpc.aio.secure_channel(_target(address), tls, _OPTIONS)


def _target(address: str) -> str:
    """As gRPC writes it, which knows lists of addresses and not of names."""
    scheme, *_ = address.split(":", 1)
    if "," not in address or scheme in ("dns", "ipv4", "ipv6"):
        return address
    each = address.split(",")
    if all(one.startswith("unix:") for one in each):
        return "unix:" + ",".join(one.removeprefix("unix:") for one in each)
    try:
        (version,) = {ip_address(one.rpartition(":")[0].strip("[]")).version for one in each}
    except ValueError as error:
        raise StartupError(
            f"the addresses {address} must all be ip:port of one version, or all unix:/path; one name may have several"
        ) from error
    return f"ipv{version}:{address}"


def passed_on(context: grpc.aio.ServicerContext[Any, Any], credentials: Credentials = NO_CREDENTIALS) -> dict[str, Any]:
    """Keyword arguments for an upstream call: what is left of the caller's deadline, its request id and trace, our own
    token.
    """
    request_id = structlog.contextvars.get_contextvars().get("request_id", "")
    metadata = ((REQUEST_ID_KEY, request_id), *passed_on_trace(), *credentials.metadata)
    return {"timeout": context.time_remaining(), "metadata": metadata}


@contextmanager
def upstream_errors(stage: str) -> Iterator[None]:
    """Turns the errors of calls made inside into leaves of the tree; `stage` is the service that was called."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_status(error, stage) from error


def check_size(request: Message) -> None:
    """Raises InvalidRequest for more than listeners take."""
    size_bytes = request.ByteSize()
    if size_bytes > MAX_RECEIVE_BYTES:
        raise InvalidRequest(f"the request has {size_bytes} bytes, at most {MAX_RECEIVE_BYTES} are allowed")


async def write_to(call: Any, request: Message) -> None:
    """Writes to a call, one request at a time; nothing where the call has ended, as reading tells.

    Past grpc.aio's own `write`, which puts INTERNAL in the place of the status that such a call has ended with. After
    one that was cancelled, nothing more may be written.
    """
    with suppress(grpc.aio.AioRpcError, grpc.aio.InternalError):
        await call.wait_for_connection()
        await call._cython_call.send_serialized_message(request.SerializeToString())


async def end_writing(call: Any) -> None:
    """Nothing more is written to the call; nothing where it has ended, as reading tells."""
    with suppress(grpc.aio.InternalError):
        await call.done_writing()


async def read_from(call: Any, stage: str) -> Any:
    """The next message of a call to the service named `stage`; None where the stream has ended.

    Raises what its status names, and PeerContract for bytes that are no message, of which grpc makes None.
    """
    with upstream_errors(stage):
        message = await call.read()
    if message is None:
        raise PeerContract(f"{stage} sent bytes that are no message")
    return None if message is grpc.aio.EOF else message


def error_from_status(error: grpc.aio.AioRpcError, stage: str) -> FramesieveError:
    """The leaf that a service named `stage` raised, as far as its status tells."""
    info, retry = _details(error)
    message = error.details() or f"{stage} failed without a reason"
    leaf = _BY_REASON.get(info.reason) or _BY_STATUS.get(error.code())
    if leaf is DeadlinePassed and not info.reason:  # grpc's own words say nothing to a caller
        return DeadlinePassed(f"the deadline passed while {stage} was at work")
    if leaf:
        return leaf(message)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if info.reason != Overloaded.reason and "larger than max" in message:
            if "CLIENT: Received" in message:
                return PeerContract(f"{stage} sent more at once than any message may have: {message}")
            return InvalidRequest(f"a request may have at most {MAX_RECEIVE_BYTES} bytes: {message}")
        return Overloaded(message, min(max(0, retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9), 60) or 1.0)
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        if info.reason == Unavailable.reason:
            return Unavailable(message, info.metadata.get("stage", stage))
        return _noted(Unavailable(f"{stage} cannot be reached", stage), message)
    if info.reason == PeerContract.reason:
        return PeerContract(message)
    if info.reason == FramesieveError.reason:  # it names its request
        return FramesieveError(message)
    return _noted(FramesieveError(f"{stage} failed"), f"{error.code().name}: {message}")


def _noted(error: FramesieveError, message: str) -> FramesieveError:
    """With gRPC's own words beside its text: they name addresses and paths, which are for logs alone."""
    error.add_note(message)
    return error


def status_message(error: FramesieveError) -> str:
    """An error's text as it is sent: what a caller gave may stand in it, at any length, so its end may be cut."""
    text = str(error).encode()
    if len(text) <= MAX_MESSAGE_BYTES:
        return str(error)
    return text[:MAX_MESSAGE_BYTES].decode(errors="ignore") + " …"


def status_details(error: FramesieveError) -> status_pb2.Status:
    """google.rpc.Status with an ErrorInfo (and a RetryInfo where a retry may help)."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)
    status = status_pb2.Status(code=grpc.StatusCode[error.status].value[0], message=status_message(error))
    if isinstance(error, Unavailable):
        info.metadata["stage"] = error.stage
    status.details.add().Pack(info)
    if isinstance(error, Overloaded):
        delay = duration_pb2.Duration(nanos=int(error.retry_after_s % 1 * 1e9), seconds=int(error.retry_after_s))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def _details(error: grpc.aio.AioRpcError) -> tuple[error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo]:
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    try:
        status = rpc_status.from_call(error)
        for detail in status.details if status else ():
            _ = detail.Unpack(info) or detail.Unpack(retry)
    except (ValueError, DecodeError):  # a peer's mistake in the details, which the status itself survives
        return error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    return info, retry
