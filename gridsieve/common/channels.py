"""Client channels: how calls to a service are balanced, retried and read, and which error a failed call raises.

The client package imports this module, so it loads grpcio and protobuf only. google.rpc and grpc_status, which read
the details of an error, are imported when an error arrives.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from gridsieve.common.address import check_address
from gridsieve.common.contract.errors import (
    DeadlinePassed,
    GridsieveError,
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
    remedy_suffix,
)
from gridsieve.common.contract.limits import LARGER_FILES, MAX_INLINE_BYTES, REQUEST_OVERHEAD_BYTES
from gridsieve.common.security.credentials import NO_CREDENTIALS, Credentials

REQUEST_ID_KEY = "x-request-id"
MEDIA_KEY = "x-first-media"  # see `affinity`
PART_KEY = "x-part-of-session"  # its end is logged at debug
# In the metadata that end a refused call: the process that refused it, and gRPC's word for a refusal that is final.
REPLICA_KEY = "x-replica"
DO_NOT_RETRY = ("grpc-retry-pushback-ms", "-1")

# The default of services, see --max-inline-bytes.
MAX_RECEIVE_BYTES = MAX_INLINE_BYTES + REQUEST_OVERHEAD_BYTES
# gRPC's words: "Received message larger than max (73400332 vs. 71303168)"
_SIZES = re.compile(r"\((\d+) vs\. (\d+)\)")

# Responses: a piece of an array has at most 2 MiB; the first message of a plan has 1 MiB and 512 media of 11 KiB each.
MAX_RESPONSE_BYTES = 8 * 2**20

# Proxy environment variables are meant for the web. A proxy would see every call and its token.
NO_PROXY = ("grpc.enable_http_proxy", 0)

# Attempts of one call, and the mean wait before the second; the wait before the third is twice as long.
ATTEMPTS = 3
BACKOFF_S = 0.1

# gRPC retries a call by itself until its first response. In the retry budget a failure costs 1 and a success returns
# 0.1: a burst of 200 retries, then one per ten calls. The waits add up to 0.3 s ± 20 %, so callers learn of a failure
# within a second.
_SERVICE_CONFIG: dict[str, Any] = {
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
# With the key of an attempt a retry of gRPC's own would meet the same replica: see `retries`.
_RETRIED_BY_CALLERS = {
    "name": [
        {"service": "gridsieve.v1.EncoderService", "method": "Encode"},
        {"service": "gridsieve.v1.GenerationService", "method": "Generate"},
    ]
}
_ROTATING: dict[str, Any] = {"round_robin": {}}
# Each replica has 4096 / replicas places on the ring: shares differ by 3 % among three replicas, by 11 % among fifty.
# 4096 is the largest ring that gRPC makes. Source: gRFC A42 (the ring), A76 (its key from a header).
_BY_MEDIA: dict[str, Any] = {
    "ring_hash_experimental": {"requestHashHeader": MEDIA_KEY, "minRingSize": 4096, "maxRingSize": 4096}
}
_RING_BY_HEADER = "GRPC_EXPERIMENTAL_RING_HASH_SET_REQUEST_HASH_KEY"

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
    ("grpc.max_send_message_length", -1),  # the service checks
    ("grpc.per_rpc_retry_buffer_size", MAX_RECEIVE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # How long connecting may take. The calls of one replica's media wait for it, until they go to another replica.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # Half the ping rate at which listeners disconnect. Idle calls are pinged too: some wait minutes for free memory.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.http2.max_pings_without_data", 0),
    NO_PROXY,
)

_BY_REASON: dict[str, type[GridsieveError]] = {
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
_BY_STATUS: dict[grpc.StatusCode, type[GridsieveError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: MediaForbidden,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlinePassed,
}


def open_channel(
    address: str,
    credentials: Credentials = NO_CREDENTIALS,
    *,
    by_media: bool = False,
    health: str = "",
) -> grpc.aio.Channel:
    """A channel that balances calls over all replicas at the address whose health is SERVING, under the name `health`.

    address: host:port, where the name may have several addresses; unix:/path; several of either, separated by commas;
        or another gRPC target (dns:///name:port).
    by_media: calls with the same MEDIA_KEY go to the same replica, those without one to any. Otherwise, and where the
        installed gRPC cannot do this, the replicas are called in turn.
    A call that fails with UNAVAILABLE before its first response is retried, on another replica if there is one and the
    replica that failed is lost or reports NOT_SERVING. Not so Encode and Generate `by_media`: their callers do that, by
    `retries`. The channel reconnects within a second once a replica is back.
    Raises StartupError for an address of another form, and where a token would cross a network in plain text.
    """
    tls = credentials.for_channel(address)
    options = [*_OPTIONS, ("grpc.service_config", _service_config(by_media, health))]
    # gRPC shares connections among channels, and also their wait before they connect again.
    if health:
        options.append(("grpc.use_local_subchannel_pool", 1))
    if tls is None:
        return grpc.aio.insecure_channel(_target(address), options)
    return grpc.aio.secure_channel(_target(address), tls, options)


class Reach:
    """Whether a replica behind each of several channels is SERVING.

    It asks for the channels' states and makes no calls, which would use up the budget for retries while a replica is
    away. So they must not be `by_media`: such channels connect when they are called.
    """

    def __init__(self, *channels: grpc.aio.Channel) -> None:
        self._reached = dict.fromkeys(channels, False)

    def __call__(self) -> bool:
        for channel in self._reached:
            state = channel.get_state(try_to_connect=True)
            if state in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE):
                self._reached[channel] = state is grpc.ChannelConnectivity.READY  # in others it connects, or again
        return all(self._reached.values())


def _service_config(by_media: bool, health: str) -> str:
    policies, methods = [_ROTATING], _SERVICE_CONFIG["methodConfig"]
    if by_media:
        os.environ[_RING_BY_HEADER] = "true"  # gRPC reads it with the configuration, and ignores the header without it
        policies.insert(0, _BY_MEDIA)
        methods = [*methods, _RETRIED_BY_CALLERS]
    # The first policy that gRPC knows.
    config = {**_SERVICE_CONFIG, "loadBalancingConfig": policies, "methodConfig": methods}
    return json.dumps(config | {"healthCheckConfig": {"serviceName": health}})


def _target(address: str) -> str:
    """The address as a gRPC target. gRPC takes lists of IP addresses and of unix sockets, but not of names."""
    scheme, *_ = address.split(":", 1)
    if scheme in ("dns", "ipv4", "ipv6", "xds"):
        return address
    each = address.split(",")
    for one in each:
        check_address("address", one)
    if len(each) == 1:
        return address
    if all(one.startswith("unix:") for one in each):
        return "unix:" + ",".join(one.removeprefix("unix:") for one in each)
    try:
        (version,) = {ip_address(one.rpartition(":")[0].strip("[]")).version for one in each}
    except ValueError as error:
        raise StartupError(
            f"the addresses {address} must all be ip:port of one version, or all unix:/path; one name may have several"
        ) from error
    return f"ipv{version}:{address}"


async def write_to(call: Any, request: Message, is_large: bool = False) -> None:
    """Writes one request to a call. Does nothing if the call has ended; reading from it tells how.

    is_large: it may have megabytes, and is serialised in a thread.

    It bypasses `call.write`, which replaces the status of an ended call by INTERNAL, through a private name of
    grpc.aio. With a grpcio that lacks that name it uses `call.write`, and the status of an ended call may be lost.
    After a cancelled write, do not write to the call again.
    """
    private = getattr(call, "_cython_call", None)
    send = getattr(private, "send_serialized_message", None)
    with suppress(grpc.aio.AioRpcError, grpc.aio.InternalError):
        if send is None:
            with suppress(asyncio.InvalidStateError):  # the call has ended
                await call.write(request)
            return
        data = await asyncio.to_thread(request.SerializeToString) if is_large else request.SerializeToString()
        await call.wait_for_connection()
        await send(data)


async def end_writing(call: Any) -> None:
    """Half-closes a call. Does nothing if the call has ended."""
    with suppress(grpc.aio.InternalError):
        await call.done_writing()


async def read_from(call: Any, stage: str) -> Any:
    """The next message of a call to the service `stage`; None at the end of the stream.

    Raises the error that the call's status names, and PeerContract for bytes that are no message (grpc reads None).
    """
    with upstream_errors(stage):
        message = await call.read()
    if message is None:
        raise PeerContract(f"{stage} sent bytes that cannot be parsed as a message")
    return None if message is grpc.aio.EOF else message


@contextmanager
def upstream_errors(stage: str) -> Iterator[None]:
    """Maps gRPC errors of calls inside to GridsieveErrors. stage: the name of the service that was called."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_status(error, stage) from error


def error_from_status(error: grpc.aio.AioRpcError, stage: str) -> GridsieveError:
    """The error that the service `stage` raised, as far as its status and details tell."""
    details = _details(error)
    message = error.details() or f"{stage} failed without a reason"
    leaf = _BY_REASON.get(details.reason) or _BY_STATUS.get(error.code())
    if leaf is DeadlinePassed and not details.reason:  # raised by gRPC here, whose text says nothing to a caller
        return DeadlinePassed(f"the deadline passed before {stage} finished")
    about = {name: details.metadata[name] for name in ("field", "value", "limit", "remedy") if name in details.metadata}
    message = message.removeprefix(f"{about.get('field', '')} ").removesuffix(remedy_suffix(about.get("remedy")))
    if leaf:
        return leaf(message, **about)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if details.reason != Overloaded.reason and "larger than max" in message:
            if "CLIENT: Received" in message:
                return PeerContract(f"{stage} sent a message above {MAX_RESPONSE_BYTES} bytes: {message}")
            sizes = (
                "{} bytes, the limit is {}".format(*found.groups()) if (found := _SIZES.search(message)) else message
            )
            text = f"the request is too large for {stage} ({sizes}, set by --max-inline-bytes)"
            return InvalidRequest(text, remedy=LARGER_FILES)
        return Overloaded(message, min(max(0, details.retry_after_s), 60) or 1.0, field=about.get("field"))
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        if details.reason == Unavailable.reason:
            return Unavailable(message, details.metadata.get("stage", stage))
        return _with_note(Unavailable(f"{stage} cannot be reached", stage), message)
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # the address is that of another service, or of another server
        return Unavailable(message, stage)
    if details.reason == PeerContract.reason:
        return PeerContract(message)
    if details.reason == GridsieveError.reason:  # the text names the request id
        return GridsieveError(message)
    return _with_note(GridsieveError(f"{stage} failed"), f"{error.code().name}: {message}")


def _with_note(error: GridsieveError, message: str) -> GridsieveError:
    """Attaches gRPC's own text as a note: it names addresses and paths, which belong into logs only."""
    error.add_note(message)
    return error


@dataclass(frozen=True, slots=True)
class _Details:
    """From google.rpc.ErrorInfo and RetryInfo; empty where the peer sent none."""

    reason: str = ""
    retry_after_s: float = 0.0
    metadata: Mapping[str, str] = field(default_factory=dict)


def _details(error: grpc.aio.AioRpcError) -> _Details:
    from google.rpc import error_details_pb2
    from grpc_status import rpc_status

    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    try:
        status = rpc_status.from_call(error)
        for detail in status.details if status else ():
            _ = detail.Unpack(info) or detail.Unpack(retry)
    except (ValueError, DecodeError):  # malformed details; code and text of the status are still good
        return _Details()
    delay = retry.retry_delay
    return _Details(info.reason, delay.seconds + delay.nanos / 1e9, info.metadata)
