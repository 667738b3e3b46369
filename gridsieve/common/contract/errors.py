"""Errors that a caller can receive, each with its gRPC status and a machine-readable reason.

    GridsieveError
    ├── InvalidRequest        INVALID_ARGUMENT     a value outside its range, a missing field
    │   ├── PromptTooLong     INVALID_ARGUMENT     a prompt that can never fit
    │   ├── MediaRejected     INVALID_ARGUMENT     media that cannot be read, or exceeds a limit
    │   └── MediaDamaged      INVALID_ARGUMENT     too many frames or packets that cannot be decoded
    ├── Unauthenticated       UNAUTHENTICATED      no token, or an unknown one
    ├── MediaForbidden        PERMISSION_DENIED    media outside the allowed folders and hosts
    ├── Overloaded            RESOURCE_EXHAUSTED   a full queue or cache; carries a retry hint
    ├── Unavailable           UNAVAILABLE          draining, or an upstream service gone; names the stage
    ├── DeadlinePassed        DEADLINE_EXCEEDED    the caller's deadline passed
    └── PeerContract          INTERNAL             another service broke the contract; details are logged only

    StartupError              (never on the wire)  a setting or file with which a service or a client cannot start

gRPC status codes are names here; `common/serving/status.py` and `common/channels.py` convert errors to statuses and
back. An error names the field of the contract that is wrong:

    InvalidRequest(field="sampling.top_p", limit="above 0 and at most 1", value=2.0)
    sampling.top_p must be above 0 and at most 1, got 2.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

_VALUE_CHARACTERS = 200
_INDEX_DIGITS = 9


class GridsieveError(Exception):
    """A failure with a status and a reason. Its text, "{field} {message}; {remedy}", is what the caller receives.

    message: the default is "must be {limit}, got {value}", or "must be {limit}" without a value.
    field: the path of what is wrong in the request, such as prompt.messages[0].parts[1].video.frame_sampling.fps.
    value: what it holds, cut to 200 characters. limit: what it may hold.
    remedy: what helps. It quotes fields in backquotes, which the text omits: set `frame_sampling.max_frames` to 12.
    """

    status: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str = "",
        *,
        field: str | None = None,
        value: object = None,
        limit: object = None,
        remedy: str | None = None,
    ) -> None:
        self.field = field
        self.value = None if value is None else str(value)[:_VALUE_CHARACTERS]
        self.limit = None if limit is None else str(limit)
        self.remedy = remedy
        got = "" if value is None else f", got {self.value!r}" if isinstance(value, str) else f", got {self.value}"
        self.message = message or f"must be {limit}{got}"
        super().__init__(self.message)

    def __str__(self) -> str:
        text = self.message if self.field is None else f"{self.field} {self.message}"
        return text + remedy_suffix(self.remedy)

    def rename(self, name_of: Callable[[str], str], remedies: Mapping[str, str]) -> None:
        """Puts the words of another interface in place of the contract's.

        name_of: of a field. remedies: the words for whole remedies; in any other the fields are renamed.
        """
        if self.field is not None:
            self.field = name_of(self.field)
        if self.remedy is not None:
            words = self.remedy.split("`")
            renamed = "".join(name_of(each) if place % 2 else each for place, each in enumerate(words))
            self.remedy = remedies.get(self.remedy, renamed)


class InvalidRequest(GridsieveError):
    """The request is wrong: a value is outside its range, or a field is missing or must not be set."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"


class PromptTooLong(InvalidRequest):
    """The prompt and its answer can never fit into the model's context or the service's memory."""

    reason = "PROMPT_TOO_LONG"


class MediaRejected(InvalidRequest):
    """An image, a video or a sound cannot be fetched or read, or exceeds a limit."""

    reason = "MEDIA_REJECTED"


class MediaDamaged(InvalidRequest):
    """More than a tenth of a video's frames, or of a sound's packets, are missing or damaged, or an image is."""

    reason = "MEDIA_DAMAGED"


class Unauthenticated(GridsieveError):
    """The caller has no valid token. The text never says what is wrong with it."""

    status = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class MediaForbidden(GridsieveError):
    """A path or URL of media is outside the folders and hosts that the service may read."""

    status = "PERMISSION_DENIED"
    reason = "MEDIA_FORBIDDEN"


class Overloaded(GridsieveError):
    """A queue or buffer is full. `retry_after_s` is a hint for clients."""

    status = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"

    def __init__(self, message: str, retry_after_s: float = 1.0, *, field: str | None = None) -> None:
        super().__init__(message, field=field)
        self.retry_after_s = retry_after_s


class Unavailable(GridsieveError):
    """A service is draining or unreachable. `stage` is its name: preprocessing, encoder or generation."""

    status = "UNAVAILABLE"
    reason = "UNAVAILABLE"

    def __init__(self, message: str, stage: str) -> None:
        super().__init__(message)
        self.stage = stage


class DeadlinePassed(GridsieveError):
    """The caller's deadline passed before the answer was complete."""

    status = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_PASSED"


class PeerContract(GridsieveError):
    """Another service sent something that the contract forbids. The text is logged and never sent to callers."""

    reason = "PEER_CONTRACT"


class StartupError(Exception):
    """A service or a client cannot start, for example with a missing weight or an unusable address.

    Commands print it, and their exit status is 2.
    """


@contextmanager
def within(name: str) -> Iterator[None]:
    """Errors inside are about a field of `name`, or about `name` itself if they have no field."""
    try:
        yield
    except GridsieveError as error:
        error.field = name if error.field in (None, name) else f"{name}.{error.field}"
        raise


def remedy_suffix(remedy: str | None) -> str:
    """The end of the text of an error with this remedy."""
    return "" if remedy is None else f"; {remedy.replace('`', '')}"


def steps_of(field: str) -> tuple[str | int, ...]:
    """A path in its parts: ("prompt", "messages", 0, "role") of prompt.messages[0].role."""
    steps = field.replace("[", ".").replace("]", "").split(".")
    return tuple(int(step) if step.isdecimal() and len(step) <= _INDEX_DIGITS else step for step in steps)


def path_of(*steps: str | int) -> str:
    """The path of these parts; the inverse of `steps_of`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")
