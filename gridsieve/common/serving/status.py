"""A GridsieveError as a gRPC status with details in google.rpc's messages. Its reader is `common/channels.py`."""

from __future__ import annotations

import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from gridsieve.common.contract.errors import GridsieveError, Overloaded, remedy_suffix

DETAILS_KEY = "grpc-status-details-bin"
ERROR_DOMAIN = "gridsieve"

# A status carries the text twice, once percent-encoded. A receiver rejects headers above 8 KiB with RESOURCE_EXHAUSTED.
MAX_MESSAGE_BYTES = 1400
_MAX_DETAIL_BYTES = 256


def status_message(error: GridsieveError) -> str:
    """The error's text, cut to MAX_MESSAGE_BYTES: it may quote input of any length."""
    field = "" if error.field is None else f"{_cut(error.field, _MAX_DETAIL_BYTES)} "  # as in the details
    text = field + error.message + remedy_suffix(error.remedy)
    cut, whole = (_cut(text, size_bytes) for size_bytes in (MAX_MESSAGE_BYTES, None))
    return whole if cut == whole else f"{cut} …"


def status_details(error: GridsieveError) -> status_pb2.Status:
    """google.rpc.Status with an ErrorInfo, and a RetryInfo for Overloaded. Its bytes go into DETAILS_KEY."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)
    status = status_pb2.Status(code=grpc.StatusCode[error.status].value[0], message=status_message(error))
    for name in ("field", "value", "limit", "remedy", "stage"):
        if (told := getattr(error, name, None)) is not None:
            info.metadata[name] = _cut(told, _MAX_DETAIL_BYTES)
    status.details.add().Pack(info)
    if isinstance(error, Overloaded):
        delay = duration_pb2.Duration(nanos=int(error.retry_after_s % 1 * 1e9), seconds=int(error.retry_after_s))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def _cut(text: str, size_bytes: int | None) -> str:
    """At most so many bytes of UTF-8. Lone surrogates, which stand for bytes of a path, are escaped."""
    return text.encode(errors="backslashreplace")[:size_bytes].decode(errors="ignore")
