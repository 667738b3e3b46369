"""POST and GET /v1/batches, GET of one, and its cancel. Batches are known to this process alone, like stored responses.

A batch's input, output and errors are uploaded files. Its requests go through the gateway as those of its caller do,
and yield to others (`service_tier` is `flex`).
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from pathlib import Path

import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gridsieve.common.contract.errors import GridsieveError, Overloaded
from gridsieve.jobs.job import Job
from gridsieve.jobs.requests import FileRequests
from gridsieve.services.gateway.batches.batch import Batch
from gridsieve.services.gateway.batches.calls import Calls
from gridsieve.services.gateway.batches.request import BatchListing, BatchRequest
from gridsieve.services.gateway.batches.rows import Rows
from gridsieve.services.gateway.files import Files
from gridsieve.services.gateway.http.body import BodyLimit, read_body
from gridsieve.services.gateway.http.errors import LARGER_BODIES, NotFound
from gridsieve.services.gateway.http.fields import parsed
from gridsieve.services.gateway.http.request_guard import Call

_WINDOW_S = 86_400.0
_BODY = BodyLimit(2**16, "the limit of a batch", LARGER_BODIES)
_MOST_LINES = 50_000  # OpenAI's
_MOST_RUNNING, _MOST_BATCHES = 8, 100
"""Of a caller. Beyond the second, those that ended first are forgotten."""
_HELD_BYTES = 2**24
_UNSENT = {
    "expired": "This request could not be answered before the completion window expired.",
    "cancelled": "This request was not answered before the batch was cancelled.",
}
_RETRY_S = 60.0

log = structlog.get_logger()


class Batches:
    """body_bytes: of a request, at most. max_bytes: of an output. expires_s: the lifetime of files."""

    def __init__(self, files: Files, body_bytes: int, max_bytes: int, expires_s: float) -> None:
        self._files = files
        self._body_bytes = body_bytes
        self._max_bytes = max_bytes
        self._lifetime_s = min(_WINDOW_S, expires_s)
        self._known: dict[str, Batch] = {}  # the oldest first
        self._tasks: set[asyncio.Task[None]] = set()

    async def endpoint(self, request: Request) -> Response:
        """POST and GET /v1/batches."""
        call = Call.of(request)
        if request.method == "POST":
            asked = parsed(BatchRequest, await read_body(request, _BODY, call.charge))
            return JSONResponse((await self._begun(asked, request, call.owner)).object())
        listing = parsed(BatchListing, json.dumps(dict(request.query_params)).encode())
        own = [each for each in reversed(self._known.values()) if each.owner == call.owner]
        start = 0
        if listing.after is not None:
            start = own.index(self._of(listing.after, call.owner)) + 1
        page = own[start : start + listing.limit]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        has_more = start + len(page) < len(own)
        data = [each.object() for each in page]
        return JSONResponse({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more})

    async def batch_endpoint(self, request: Request) -> Response:
        """GET /v1/batches/{batch_id}."""
        return JSONResponse(self._of(request.path_params["batch_id"], Call.of(request).owner).object())

    async def cancel_endpoint(self, request: Request) -> Response:
        """POST /v1/batches/{batch_id}/cancel."""
        batch = self._of(request.path_params["batch_id"], Call.of(request).owner)
        batch.cancel()
        return JSONResponse(batch.object())

    def _of(self, batch_id: str, owner: str) -> Batch:
        found = self._known.get(batch_id)
        if found is None or found.owner != owner:
            text = f"{batch_id[:80]!r} names no batch of this caller that this gateway knows"
            raise NotFound(text, field="batch_id", value=batch_id)
        return found

    async def _begun(self, asked: BatchRequest, request: Request, owner: str) -> Batch:
        path = await asyncio.to_thread(self._files.batch_input, asked.input_file_id, owner)
        self._forget(owner)
        now_s = time.time()
        batch = Batch(f"batch_{uuid.uuid4().hex}", owner, asked, now_s, now_s + self._lifetime_s)
        self._known[batch.id] = batch
        task = asyncio.create_task(self._run(batch, path, Calls(request)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return batch

    def _forget(self, owner: str) -> None:
        """Makes room for one of a caller. Raises Overloaded if as many run as may."""
        own = [each for each in self._known.values() if each.owner == owner]
        ended = [each for each in own if each.ended]
        if len(own) - len(ended) >= _MOST_RUNNING:
            raise Overloaded(f"{_MOST_RUNNING} batches of this caller run, as many as may", retry_after_s=_RETRY_S)
        if len(own) >= _MOST_BATCHES:
            del self._known[ended[0].id]

    async def _run(self, batch: Batch, path: Path, calls: Calls) -> None:
        try:
            limits = (_MOST_LINES, self._body_bytes)
            requests = await asyncio.to_thread(FileRequests.read, path, batch.asked.endpoint, *limits)
            batch.total = len(requests.ids)
            with Rows.arriving(batch, requests.ids, self._files, self._max_bytes) as rows:
                end = await self._answered(batch, Job(requests, calls.ask, rows.write, held_bytes=_HELD_BYTES))
                try:
                    if end in _UNSENT:
                        await asyncio.to_thread(rows.write_missing, f"batch_{end}", _UNSENT[end])
                finally:  # what was answered is not lost
                    await asyncio.to_thread(rows.keep)
            batch.move_to(end)
        except Exception as error:
            if not isinstance(error, GridsieveError | OSError):
                log.exception("bug", batch=batch.id)
            batch.fail(error)
        log.info("batch ended", batch=batch.id, status=batch.status, completed=batch.completed, failed=batch.failed)

    async def _answered(self, batch: Batch, job: Job) -> str:
        """Asks the requests. Returns the status with which the batch ends."""
        if batch.status == "cancelling":
            return "cancelled"
        batch.move_to("in_progress")
        batch.running = running = asyncio.create_task(job.run(range(batch.total)))
        try:
            done, _ = await asyncio.wait([running], timeout=batch.expires_s - time.time())
        finally:
            running.cancel()
        if not done:
            await asyncio.wait([running])
            return "expired"
        if running.cancelled():
            return "cancelled"
        if error := running.exception():
            batch.error = error
            return "failed"
        batch.move_to("finalizing")
        return "completed"
