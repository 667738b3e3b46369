"""The rows of a batch, on the disk of uploads: those with answers become one file, the others a second one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.jobs.lines import Row, is_answered, unsent_row
from gridsieve.services.gateway.batches.batch import Batch
from gridsieve.services.gateway.files import Arriving, Files

_OUTPUT, _ERROR = "batch_output", "batch_error"


class Rows:
    """max_bytes: of each of the two files."""

    def __init__(self, batch: Batch, ids: Sequence[str], answers: Arriving, errors: Arriving, max_bytes: int) -> None:
        self._batch = batch
        self._missing = dict.fromkeys(ids)
        self._answers = answers
        self._errors = errors
        self._max_bytes = max_bytes

    @classmethod
    @contextmanager
    def arriving(cls, batch: Batch, ids: Sequence[str], files: Files, max_bytes: int) -> Iterator[Rows]:
        with closing(files.arriving(batch.owner)) as answers, closing(files.arriving(batch.owner)) as errors:
            yield cls(batch, ids, answers, errors, max_bytes)

    def write(self, row: Row) -> None:
        """Adds a row. Raises InvalidRequest where its file would be too large, OSError."""
        answered = is_answered(row)
        file = self._answers if answered else self._errors
        data = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        if file.size_bytes + len(data) > self._max_bytes:
            raise InvalidRequest(
                f"the rows have more bytes than a file may have: --upload-max-bytes is {self._max_bytes}"
            )
        file.write(data)
        del self._missing[row["custom_id"]]
        self._batch.completed += answered
        self._batch.failed += not answered

    def write_missing(self, code: str, why: str) -> None:
        """Adds a row for each request that has none."""
        for custom_id in list(self._missing):
            self.write(unsent_row(custom_id, code, why))

    def keep(self) -> None:
        """Makes files of them, whose ids the batch gets. Blocks on the disk."""
        batch = self._batch
        if self._answers.size_bytes:
            batch.output_file_id = self._answers.keep(f"{batch.id}_output.jsonl", _OUTPUT)
        if self._errors.size_bytes:
            batch.error_file_id = self._errors.keep(f"{batch.id}_error.jsonl", _ERROR)
