"""A worker of a job: asks about the clips of a batch, many at once, and makes a row of each answer or refusal."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeAlias

import fsspec
import pyarrow as pa
import pyarrow.compute as pc

from gridsieve.cli.launcher import LocalStack
from gridsieve.client.answer import Answer
from gridsieve.client.client import GridsieveClient
from gridsieve.client.credentials import Access
from gridsieve.client.prompt import Options, Video, check_scheme, is_url
from gridsieve.common.contract.errors import (
    GridsieveError,
    InvalidRequest,
    MediaRejected,
    Overloaded,
    Unauthenticated,
    Unavailable,
)

ReadBy: TypeAlias = Literal["worker", "service"]

# Services that are gone for so long fail the job.
PATIENCE_S = 600.0
RETRY_S = 1.0
READ_TRIES = 3
_COLUMNS = pa.schema(
    {
        "answer": pa.string(),
        "finish_reason": pa.string(),
        "prompt_tokens_full": pa.int64(),
        "prompt_tokens": pa.int64(),
        "completion_tokens": pa.int64(),
        "media_tokens": pa.int64(),
        "kept_tokens": pa.int64(),
        "error": pa.string(),
        "message": pa.string(),
    }
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Task:
    """What all workers of a job are told; see `Asking`. question: of rows without their own."""

    question: str | None
    options: Options
    _: KW_ONLY
    services: str | LocalStack
    access: Access
    in_flight: int
    read_by: ReadBy
    max_inline_bytes: int
    frames: Mapping[str, Any]


class Worker:
    """Ray makes one in a process of its own, and calls it for several batches at once, in one event loop.

    Raises StartupError if its stack cannot start.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._stack = task.services if isinstance(task.services, LocalStack) else None
        if self._stack is not None:
            self._stack.start()
        self._client: GridsieveClient | None = None  # of the event loop, which is not running yet
        self._places = asyncio.Semaphore(task.in_flight)

    def __del__(self) -> None:
        """Ray lets go of a worker at the end of the job."""
        if self._stack is not None:
            self._stack.stop()

    async def __call__(self, clips: pa.Table) -> pa.Table:
        """The clips with the columns of their answers, in the same order."""
        if self._client is None:
            address = self._stack.address if self._stack else str(self._task.services)
            self._client = GridsieveClient(address, **self._task.access)
        questions = questions_of(clips, self._task.question)
        asked = zip(clips["uri"].to_pylist(), questions.to_pylist(), strict=True)
        rows = await asyncio.gather(*(self._row(self._client, uri, question) for uri, question in asked))
        answered = pa.Table.from_pylist(rows, schema=_COLUMNS).add_column(0, "question", questions)
        kept = [name for name in clips.column_names if name not in answered.column_names]
        return pa.table([*clips.select(kept).columns, *answered.columns], [*kept, *answered.column_names])

    async def _row(self, client: GridsieveClient, uri: str, question: str) -> dict[str, str | int]:
        async with self._places:
            try:
                clip = await self._clip(uri)
                answer = await self._answer(client, clip, question)
            except Unauthenticated:
                raise
            except Unavailable as lost:
                raise ConnectionError(f"{lost}, for {PATIENCE_S:g} s") from None  # `Unavailable` cannot be pickled
            except GridsieveError as refused:
                return {"error": refused.reason, "message": str(refused)}
        usage = answer.usage
        return {
            "answer": answer.text,
            "finish_reason": answer.reason.value,
            "prompt_tokens_full": usage.prompt_tokens_full,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "media_tokens": sum(each.grid.tokens for each in usage.media),
            "kept_tokens": sum(each.num_kept for each in usage.media),
        }

    async def _clip(self, uri: str) -> Video:
        """Reads again what may pass, such as a storage that cannot be reached. Raises as `_read`, and ConnectionError,
        which fails the job: other clips would fail alike."""
        for tries_left in reversed(range(READ_TRIES)):
            try:
                return await asyncio.to_thread(self._read, uri)
            except (ImportError, GridsieveError):
                raise
            except Exception as error:  # each file system has its own
                if not tries_left or isinstance(error, PermissionError):
                    raise ConnectionError(f"{uri} cannot be read: {error!r}") from None
            await asyncio.sleep(RETRY_S)
        raise AssertionError

    def _read(self, uri: str) -> Video:
        """Raises MediaRejected for a clip that is not there or is too large."""
        frames, limit = self._task.frames, self._task.max_inline_bytes
        if self._task.read_by == "service":
            check_scheme(uri)
            return Video(url=uri, **frames) if is_url(uri) else Video(server_path=uri, **frames)
        try:
            files, path = fsspec.url_to_fs(uri)
            size_bytes = files.size(path) or 0  # of a web server that does not tell it: None
            data = b"" if size_bytes > limit else files.cat_file(path)
            size_bytes = size_bytes or len(data)
        except (FileNotFoundError, IsADirectoryError, ValueError) as error:  # the last: of an unknown protocol
            raise MediaRejected(f"{uri} cannot be read: {error!r}") from error
        if size_bytes > limit:
            raise MediaRejected(
                f"{uri} has {size_bytes} bytes, at most {limit} are sent",
                remedy="raise max_inline_bytes and the services' --max-inline-bytes, or let the services read it",
            )
        return Video(data=data, **frames)

    async def _answer(self, client: GridsieveClient, clip: Video, question: str) -> Answer:
        """Asks again while services are full or gone, which says nothing of the clip."""
        gone_from_s: float | None = None
        while True:
            try:
                return await client.ask(clip, question, **self._task.options)
            except Overloaded as full:
                gone_from_s, wait_s = None, full.retry_after_s
            except Unavailable:
                self._begin_again_without_stack()
                now_s, wait_s = time.monotonic(), RETRY_S
                gone_from_s = gone_from_s or now_s
                if now_s - gone_from_s > PATIENCE_S:
                    raise
            await asyncio.sleep(wait_s)

    def _begin_again_without_stack(self) -> None:
        """Ends this process if a service of its stack has ended: Ray starts the worker again, and its batches."""
        if self._stack is not None and (ended := self._stack.ended()):
            log.error("%s has ended; the worker begins again", ended)
            self._stack.kill()
            os._exit(1)


def questions_of(clips: pa.Table, question: str | None) -> pa.ChunkedArray:
    """The question about each row. Raises InvalidRequest for a row without one."""
    if "question" in clips.column_names:
        questions = clips["question"].cast(pa.string())
    else:
        questions = pa.chunked_array([pa.nulls(len(clips), pa.string())])
    if question is not None:
        questions = pc.fill_null(questions, question)
    if questions.null_count:
        raise InvalidRequest("is missing: give one for all clips, or a column with one for each", field="question")
    return questions
