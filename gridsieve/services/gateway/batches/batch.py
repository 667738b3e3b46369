"""A batch: its object as OpenAI's client reads it, from its creation to its end.

    validating ──> in_progress ──> finalizing ──> completed
        │               ├──> cancelling ────────> cancelled
        │               └──> expired, failed
        └──> failed
Rows of whatever was asked are files once it has ended.

Source: OpenAI's API reference, "the batch object".
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from gridsieve.common.contract.errors import GridsieveError
from gridsieve.jobs.requests import WrongLine
from gridsieve.services.gateway.batches.request import BatchRequest

_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


@dataclass(eq=False, slots=True)
class Batch:
    """expires_s: when it ends, in seconds since 1970. running: what asks its requests; None before and after.

    total, completed, failed: requests. output_file_id, error_file_id: of rows with answers, and of other rows.
    """

    id: str
    owner: str
    asked: BatchRequest
    created_s: float
    expires_s: float
    status: str = "validating"
    times: dict[str, int] = field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    error: BaseException | None = None
    running: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")

    def move_to(self, status: str) -> None:
        self.status = status
        self.times[status] = int(time.time())

    def cancel(self) -> None:
        """Nothing happens if it ends already."""
        if self.status in ("validating", "in_progress"):
            self.move_to("cancelling")
            if self.running:
                self.running.cancel()

    def fail(self, error: BaseException) -> None:
        """error: why the batch failed as a whole."""
        self.error = error
        self.move_to("failed")

    def object(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.asked.endpoint,
            "errors": self._errors(),
            "input_file_id": self.asked.input_file_id,
            "completion_window": self.asked.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": int(self.created_s),
            "expires_at": int(self.expires_s),
            **{f"{name}_at": self.times.get(name) for name in _TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.asked.metadata,
        }

    def _errors(self) -> dict[str, Any] | None:
        """Why it failed as a whole."""
        if (error := self.error) is None:
            return None
        told: dict[str, Any] = {"code": "INTERNAL", "message": "an internal error", "line": None, "param": None}
        if isinstance(error, GridsieveError):
            told |= {"code": error.reason, "message": str(error), "param": error.field}
        if isinstance(error, WrongLine):
            told |= {"line": error.line, "param": error.param}
        if isinstance(error, OSError):
            told |= {"code": "FILE", "message": f"a file cannot be read or written: {error.strerror}"}
        return {"object": "list", "data": [told]}
