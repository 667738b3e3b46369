"""Errors that a caller can receive, each with its gRPC status and a machine-readable reason.

    FramesieveError
    ├── InvalidRequest        INVALID_ARGUMENT     a value outside its range, a missing field
    │   ├── PromptTooLong     INVALID_ARGUMENT     a prompt that can never fit
    │   ├── MediaRejected     INVALID_ARGUMENT     media that cannot be read, or exceeds a limit
    │   └── MediaDamaged      INVALID_ARGUMENT     too many frames that cannot be decoded
    ├── Unauthenticated       UNAUTHENTICATED      no token, or an unknown one
    ├── MediaForbidden        PERMISSION_DENIED    media outside the allowed folders and hosts
    ├── Overloaded            RESOURCE_EXHAUSTED   a full queue or cache; carries a retry hint
    ├── Unavailable           UNAVAILABLE          draining, or an upstream service gone; names the stage
    ├── DeadlinePassed        DEADLINE_EXCEEDED    the caller's deadline passed
    └── PeerContract          INTERNAL             another service broke the contract; details are logged only

    StartupError              (never on the wire)  a setting or file with which a service cannot start

gRPC status codes are names here; `common/serving/status.py` and `common/channels.py` convert errors to statuses and
back.
"""

from __future__ import annotations

from typing import ClassVar


class FramesieveError(Exception):
    """A failure with a status and a reason. The caller receives its text."""

    status: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"


class InvalidRequest(FramesieveError):
    """The request is wrong. The text names the field, the value and the limit."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"


class PromptTooLong(InvalidRequest):
    reason = "PROMPT_TOO_LONG"


class MediaRejected(InvalidRequest):
    reason = "MEDIA_REJECTED"


class MediaDamaged(InvalidRequest):
    reason = "MEDIA_DAMAGED"


class Unauthenticated(FramesieveError):
    """The caller has no valid token. The text never says what is wrong with it."""

    status = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class MediaForbidden(FramesieveError):
    status = "PERMISSION_DENIED"
    reason = "MEDIA_FORBIDDEN"


class Overloaded(FramesieveError):
    """A queue or buffer is full. `retry_after_s` is a hint for clients."""

    status = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(FramesieveError):
    """A service is draining or unreachable. `stage` is its name: preprocessing, encoder or generation."""

    status = "UNAVAILABLE"
    reason = "UNAVAILABLE"

    def __init__(self, message: str, stage: str) -> None:
        super().__init__(message)
        self.stage = stage


class DeadlinePassed(FramesieveError):
    status = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_PASSED"


class PeerContract(FramesieveError):
    """Another service sent something that the contract forbids. The text is logged and never sent to callers."""

    reason = "PEER_CONTRACT"


class StartupError(Exception):
    """A service cannot start, for example with a missing weight. It is printed, and the exit status is 2."""
