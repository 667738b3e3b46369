"""A FramesieveError as a gRPC status with details in google.rpc's messages. Its reader is `common/channels.py`."""

from __future__ import annotations

import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from framesieve.common.contract.errors import FramesieveError, Overloaded, Unavailable

DETAILS_KEY = "grpc-status-details-bin"
ERROR_DOMAIN = "framesieve"

# A status carries the text twice, once percent-encoded. A receiver rejects headers above 8 KiB with RESOURCE_EXHAUSTED.
MAX_MESSAGE_BYTES = 1500


def status_message(error: FramesieveError) -> str:
    """The error's text, cut to MAX_MESSAGE_BYTES: it may quote input of any length."""
    text = str(error).encode()
    if len(text) <= MAX_MESSAGE_BYTES:
        return str(error)
    return text[:MAX_MESSAGE_BYTES].decode(errors="ignore") + " …"


def status_details(error: FramesieveError) -> status_pb2.Status:
    """google.rpc.Status with an ErrorInfo, and a RetryInfo for Overloaded. Its bytes go into DETAILS_KEY."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)
    status = status_pb2.Status(code=grpc.StatusCode[error.status].value[0], message=status_message(error))
    if isinstance(error, Unavailable):
        info.metadata["stage"] = error.stage
    status.details.add().Pack(info)
    if isinstance(error, Overloaded):
        delay = duration_pb2.Duration(nanos=int(error.retry_after_s % 1 * 1e9), seconds=int(error.retry_after_s))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status
