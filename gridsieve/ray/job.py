"""A job: rows with URIs become rows with answers, which Ray Data writes as Parquet.

Ray starts a lost worker again and gives it its rows again. It writes the rows of a task to a file whose name does not
change when the task is repeated, so that no row is written twice. The output is the only state: a job that begins again
reads there what has been asked.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Unpack, cast

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.data import ActorPoolStrategy, Dataset

from gridsieve.cli.launcher import LocalStack
from gridsieve.client.client import DEFAULT_ADDRESS
from gridsieve.client.credentials import Access
from gridsieve.client.messages import generate_request
from gridsieve.client.prompt import Options, Video, user_turn
from gridsieve.common.contract.limits import MAX_INLINE_BYTES
from gridsieve.ray.worker import ReadBy, Task, Worker, questions_of

IN_FLIGHT = 32
ROWS_PER_FILE = 256
# Batches of a worker: two are asked, so that the second's requests take the places of those of the first that are done,
# and two wait.
_ASKED, _WAITING = 2, 2
_READERS = 32

log = logging.getLogger(__name__)


class Asking(Options, total=False):
    """How a job asks. A key that is missing means its default; those of `Options` are of each request.

    services: the address of generation, or several separated by commas; or a `LocalStack` that is not started, which
        each worker starts for itself. Default: 127.0.0.1:50053.
    access: how a worker connects to an address. Files are those of the worker's machine.
    workers: how many. Default: one for each node that lives when the job begins.
    in_flight: requests of a worker at the same time. Default: 32.
    reserve: what Ray reserves for a worker, by the names of `Dataset.map_batches`: num_cpus, num_gpus, memory,
        resources, label_selector, accelerator_type. Default: nothing, so that no job waits for ever for the core that
        dividing and writing rows needs. A worker that reserves no GPU sees all of its node.
    read_by: "worker": a worker reads the clip by fsspec and sends its bytes. "service": only its name is sent, a path
        below preprocessing's --media-root or a URL that preprocessing fetches. Default: "worker".
    max_inline_bytes: of a clip that a worker reads: the services' --max-inline-bytes. Default: 64 MiB.
    frames: which frames of a clip, by the names of `Video`: {"mode": "keyframes", "max_frames": 32}.
    """

    services: str | LocalStack
    access: Access
    workers: int
    in_flight: int
    reserve: Mapping[str, Any]
    read_by: ReadBy
    max_inline_bytes: int
    frames: Mapping[str, Any]


def run(
    clips: Iterable[str] | Dataset,
    output: str,
    question: str | None = None,
    *,
    rows_per_file: int = ROWS_PER_FILE,
    **asking: Unpack[Asking],
) -> None:
    """Writes the `answers` about clips that are not in the output yet, and returns once all are there.

    clips: paths or URIs, each asked about once; or a dataset as of `answers`, in which no row occurs twice.
    output: a folder of Parquet files: a path that all nodes share, or a URI of fsspec. One job at a time may write to
        it. Files without their end, which a killed job left, are removed.
    rows_per_file: so many rows are written together. What was not written is asked by the job that begins again.
    Raises as `answers`.
    """
    if not isinstance(clips, Dataset):
        clips = ray.data.from_items([{"uri": uri} for uri in dict.fromkeys(clips)])
    files, path = fsspec.url_to_fs(output)
    if done := written(files, path):
        clips = clips.map_batches(without, batch_format="pyarrow", fn_args=[done, question])
    answers(clips, question, **asking).write_parquet(path, filesystem=files, min_rows_per_file=rows_per_file)


def answers(clips: Dataset, question: str | None = None, **asking: Unpack[Asking]) -> Dataset:
    """The dataset with columns for the answers, for other steps and sinks than those of `run`.

    clips: with the column `uri`, and `question` where rows have questions of their own. Other columns are kept.
    question: of rows without their own.
    Rows get `question`; `answer` and `finish_reason`; `prompt_tokens_full`, `prompt_tokens` after pruning and
    `completion_tokens`; `media_tokens` and those of them that were kept, `kept_tokens`; `error` and `message`. Where a
    clip cannot be read or is refused, `error` has the reason, and only `message` and the question are set with it;
    elsewhere both are null.
    Raises TypeError for an unknown option, InvalidRequest for a value that a request cannot hold. While rows are
    computed, Ray raises what would fail all of them: a stack that cannot start, a refused token, rows without a
    question, services that are gone for ten minutes.
    """
    task = task_of(question, asking)
    workers = asking.get("workers") or sum(bool(node["Alive"]) for node in ray.nodes())
    pool = ActorPoolStrategy(
        size=workers, max_concurrent_calls_per_actor=_ASKED, max_tasks_in_flight_per_actor=_ASKED + _WAITING
    )
    reserve = {"num_cpus": 0} | dict(asking.get("reserve", {}))  # Ray's own default of 1 could take the last core
    batches = clips.repartition(target_num_rows_per_block=task.in_flight)
    return batches.map_batches(
        Worker,
        fn_constructor_args=[task],
        batch_size=task.in_flight,
        batch_format="pyarrow",
        compute=pool,
        udf_modifying_row_count=False,
        **reserve,
    )


def task_of(question: str | None, asking: Asking) -> Task:
    """What `Asking` says to workers. Raises what the client would raise for each request."""
    own = Asking.__annotations__.keys() - Options.__annotations__.keys()
    options = cast(Options, {name: value for name, value in asking.items() if name not in own})
    task = Task(
        question,
        options,
        services=asking.get("services", DEFAULT_ADDRESS),
        access=asking.get("access", {}),
        in_flight=asking.get("in_flight", IN_FLIGHT),
        read_by=asking.get("read_by", "worker"),
        max_inline_bytes=asking.get("max_inline_bytes", MAX_INLINE_BYTES),
        frames=asking.get("frames", {}),
    )
    generate_request([user_turn(Video(data=b"", **task.frames), question or "")], options)
    return task


def without(clips: pa.Table, done: frozenset[tuple[str, str]], question: str | None) -> pa.Table:
    """The rows whose pair of URI and question is not done. question: of rows without their own."""
    asked = zip(clips["uri"].to_pylist(), questions_of(clips, question).to_pylist(), strict=True)
    return clips.filter(pa.array([each not in done for each in asked], pa.bool_()))


def written(files: fsspec.AbstractFileSystem, folder: str) -> frozenset[tuple[str, str]]:
    """URI and question of each row in the Parquet files of a folder. Removes files without an end."""
    files.invalidate_cache()
    with ThreadPoolExecutor(_READERS) as readers:
        found = readers.map(partial(_rows_of, files), files.glob(f"{glob.escape(folder)}/*.parquet"))
        return frozenset(row for rows in found for row in rows)


def _rows_of(files: fsspec.AbstractFileSystem, name: str) -> list[tuple[str, str]]:
    with files.open(name) as opened:
        try:
            table = pq.ParquetFile(opened)
        except pa.ArrowInvalid:
            log.warning("%s has no end: it is removed, and its clips are asked about again", name)
            files.rm_file(name)
            return []
        rows = table.read(["uri", "question"])
    return list(zip(rows["uri"].to_pylist(), rows["question"].to_pylist(), strict=True))
