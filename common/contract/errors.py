"""Every error that a caller can see, each with its gRPC status and its machine-readable reason.

    FramesieveError
    ├── InvalidRequest        INVALID_ARGUMENT     a value outside its range, a missing field
    │   ├── PromptTooLong     INVALID_ARGUMENT     a prompt that can never fit
    │   ├── MediaRejected     INVALID_ARGUMENT     media that is no media, or passes a limit
    │   └── MediaDamaged      INVALID_ARGUMENT     too many frames that cannot be decoded
    ├── Unauthenticated       UNAUTHENTICATED      no token, or none that is known
    ├── MediaForbidden        PERMISSION_DENIED    media that may not be reached
    ├── Overloaded            RESOURCE_EXHAUSTED   a full queue or cache; carries a retry hint
    ├── Unavailable           UNAVAILABLE          draining, or an upstream service gone; names the stage
    ├── DeadlinePassed        DEADLINE_EXCEEDED    the caller's deadline
    └── PeerContract          INTERNAL             a peer broke the contract, and only the log says how

    StartupError              (never on the wire)  a service that cannot start as it was told to

It knows gRPC's status codes by name only; `common.serving.interceptors` turns a leaf into a status.
"""

from __future__ import annotations

from typing import ClassVar


class FramesieveError(Exception):
    """A failure with a status and a reason; its text is written for the caller."""

    status: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"


class InvalidRequest(FramesieveError):
    """The request itself is wrong; the text names the field, the value and the limit."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"


class PromptTooLong(InvalidRequest):
    reason = "PROMPT_TOO_LONG"


class MediaRejected(InvalidRequest):
    reason = "MEDIA_REJECTED"


class MediaDamaged(InvalidRequest):
    reason = "MEDIA_DAMAGED"


class Unauthenticated(FramesieveError):
    """The caller is nobody that is known. The text never says what of its token was wrong."""

    status = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class MediaForbidden(FramesieveError):
    status = "PERMISSION_DENIED"
    reason = "MEDIA_FORBIDDEN"


class Overloaded(FramesieveError):
    """No room now. `retry_after_s` is a hint, in seconds."""

    status = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(FramesieveError):
    """A stage is draining or gone. `stage` is the service's name."""

    status = "UNAVAILABLE"
    reason = "UNAVAILABLE"

    def __init__(self, message: str, stage: str) -> None:
        super().__init__(message)
        self.stage = stage


class DeadlinePassed(FramesieveError):
    status = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_PASSED"


class PeerContract(FramesieveError):
    """A peer sent what the contract forbids. The text is for the log, never for the caller."""

    reason = "PEER_CONTRACT"


class StartupError(Exception):
    """A service cannot start: a missing weight, an unsupported setting. Printed, then exit status 2."""
