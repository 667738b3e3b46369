"""Uploaded files: sent once, asked about often.

    --upload-root/
      <sha256 of the Authorization header>/      each caller finds its own files only
        <sha256 of the file>                     what preprocessing reads, below its own --upload-root
        <sha256 of the file>.json                name, purpose; its time of change begins the file's lifetime

The outputs of batches are files, too. All replicas of the gateway may share the folder. Source of the objects: OpenAI's
API reference, "files".
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import structlog
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from gridsieve.common.contract.errors import InvalidRequest, Overloaded
from gridsieve.common.contract.uploads import upload_url
from gridsieve.services.gateway.http.body import BodyLimit, announced_bytes, bounded
from gridsieve.services.gateway.http.errors import LARGER_UPLOADS, NotFound
from gridsieve.services.gateway.http.fields import parsed
from gridsieve.services.gateway.http.request_guard import Call

_ID = re.compile(r"file-([0-9a-f]{64})")
_PIECE_BYTES = 2**20
_FORM_BYTES = 2**16
"""A form's boundaries and its other fields."""
Uploads: TypeAlias = Callable[[str], str]
"""The URL of a caller's file for preprocessing, by its id. Raises InvalidRequest."""
_OFF = "uploads are off: the gateway has no --upload-root"
BATCH = "batch"
"""The purpose of files that batches read."""
_FULL_S = 60.0
"""After which a full disk may have room again."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of one file and of all, and seconds from its upload until a file is deleted."""

    file_bytes: int
    all_bytes: int
    expires_s: float


class Listing(BaseModel):
    """The query of GET /v1/files. after: the id of the last file of the page before."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class Arriving:
    """A file that is being written. What is not kept is gone once it is closed; both may be called twice."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._path = folder / f".{os.getpid()}-{time.monotonic_ns()}"
        self._file = self._path.open("wb")
        self._digest = hashlib.sha256()
        self.size_bytes = 0

    def write(self, piece: bytes) -> None:
        self._digest.update(piece)
        self._file.write(piece)
        self.size_bytes += len(piece)

    def keep(self, filename: str, purpose: str) -> str:
        """Gives it its name, the digest. Returns the file's id."""
        self._file.close()
        name = self._digest.hexdigest()
        self._path.replace(kept := self._path.with_name(name))
        kept.with_name(f"{name}.json").write_text(json.dumps({"filename": filename, "purpose": purpose}))
        return f"file-{name}"

    def close(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


class Files:
    """root: None where uploads are off."""

    def __init__(self, root: Path | None, limits: Limits) -> None:
        self._root = root
        self._limits = limits
        self._arriving_bytes = 0
        setting = f"--upload-max-bytes is {limits.file_bytes}"
        self._body_limit = BodyLimit(limits.file_bytes + _FORM_BYTES, setting, LARGER_UPLOADS)

    @property
    def limits(self) -> Limits | None:
        """None where uploads are off."""
        return self._limits if self._root else None

    def url(self, file_id: str, owner: str) -> str:
        """The URL of a file for preprocessing. Raises NotFound, InvalidRequest."""
        return upload_url(owner, self._known(file_id, owner)["digest"])

    def batch_input(self, file_id: str, owner: str) -> Path:
        """An uploaded file of purpose batch, whose lifetime begins again. Raises NotFound, InvalidRequest."""
        known = self._known(file_id, owner)
        if known["purpose"] != BATCH:
            raise InvalidRequest("must be uploaded with the purpose batch", field="input_file_id", value=file_id)
        path = self._folder(owner) / str(known["digest"])
        for each in (path, path.with_name(f"{path.name}.json")):
            os.utime(each)
        return path

    def arriving(self, owner: str) -> Arriving:
        """A new file of a caller. Raises InvalidRequest where uploads are off."""
        return Arriving(self._folder(owner))

    async def endpoint(self, request: Request) -> Response:
        """POST and GET /v1/files."""
        owner = Call.of(request).owner
        if request.method == "POST":
            return JSONResponse(await self._upload(request, owner))
        asked = parsed(Listing, json.dumps(dict(request.query_params)).encode())
        return JSONResponse(await asyncio.to_thread(self._page, owner, asked))

    async def file_endpoint(self, request: Request) -> Response:
        """GET and DELETE /v1/files/{file_id}."""
        file_id, owner = request.path_params["file_id"], Call.of(request).owner
        known = self._known(file_id, owner)
        if request.method == "DELETE":
            self._delete(self._folder(owner) / known["digest"])
            return JSONResponse({"id": file_id, "object": "file", "deleted": True})
        return JSONResponse(self._object(known))

    async def content_endpoint(self, request: Request) -> Response:
        """GET /v1/files/{file_id}/content."""
        owner = Call.of(request).owner
        known = self._known(request.path_params["file_id"], owner)
        path, kind = self._folder(owner) / known["digest"], "application/octet-stream"
        return FileResponse(path, media_type=kind, filename=known["filename"] or "file")

    async def expire(self, every_s: float = 60.0) -> None:
        """Deletes files whose time is over, until it is cancelled."""
        while self._root is not None:
            await asyncio.to_thread(self._delete_expired, self._root)
            await asyncio.sleep(every_s)

    async def _upload(self, request: Request, owner: str) -> dict[str, Any]:
        self._folder(owner)
        received = bounded(request, self._body_limit, Call.of(request).charge)
        size_bytes = announced_bytes(request)
        if size_bytes is None or "content-encoding" in request.headers:
            size_bytes = self._body_limit.size_bytes
        self._arriving_bytes += size_bytes
        try:
            await self._check_disk(size_bytes, self._arriving_bytes)
            async with received.form(max_files=1, max_fields=8) as form:
                sent = form.get("file")
                if not isinstance(sent, UploadFile):
                    raise InvalidRequest(field="file", limit="set, as a file of a multipart/form-data body")
                if useless := sorted(form.keys() - {"file", "purpose"}):
                    raise InvalidRequest("is not a field that this service knows", field=useless[0])
                return await asyncio.to_thread(self._keep, sent, str(form.get("purpose", "user_data")), owner)
        except HTTPException as error:  # of Starlette's form parser
            raise InvalidRequest(f"the body is not multipart/form-data: {error.detail}") from None
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise Overloaded("the disk of --upload-root is full", retry_after_s=_FULL_S) from error
        finally:
            self._arriving_bytes -= size_bytes

    async def _check_disk(self, size_bytes: int, arriving_bytes: int) -> None:
        """arriving_bytes: of this upload, which has size_bytes, and of those that began before it and still run: what
        ended is found in the folder. Raises Overloaded."""
        used_bytes = await asyncio.to_thread(self._used_bytes)
        if used_bytes + arriving_bytes > self._limits.all_bytes:
            others_bytes = used_bytes + arriving_bytes - size_bytes
            raise Overloaded(
                f"uploaded files, and those that arrive, have {others_bytes} bytes, this one {size_bytes} more, "
                f"--upload-disk-bytes is {self._limits.all_bytes}",
                retry_after_s=_FULL_S,
            )

    def _used_bytes(self) -> int:
        assert self._root is not None
        used_bytes = 0
        for path in self._root.glob("*/*"):
            with suppress(FileNotFoundError):  # it was renamed or deleted
                used_bytes += path.stat().st_size
        return used_bytes

    def _keep(self, sent: UploadFile, purpose: str, owner: str) -> dict[str, Any]:
        with closing(self.arriving(owner)) as arriving:
            while piece := sent.file.read(_PIECE_BYTES):
                arriving.write(piece)
            file_id = arriving.keep(sent.filename or "", purpose)
        return self._object(self._known(file_id, owner))

    def _folder(self, owner: str) -> Path:
        if self._root is None:
            raise InvalidRequest(_OFF)
        return self._root / owner

    def _known(self, file_id: str, owner: str) -> dict[str, Any]:
        """What is known of a file. Raises NotFound where there is none, or its time is over."""
        folder, found = self._folder(owner), _ID.fullmatch(file_id)
        with suppress(FileNotFoundError):
            if found and (known := self._read(folder / found[1])) is not None:
                return known
        text = f"{file_id[:80]!r} names no file of this caller, or one that has expired"
        raise NotFound(text, field="file_id", value=file_id)

    def _read(self, path: Path) -> dict[str, Any] | None:
        notes = path.with_name(f"{path.name}.json")
        created_s = notes.stat().st_mtime
        if created_s + self._limits.expires_s < time.time():
            return None
        known: dict[str, Any] = json.loads(notes.read_text())
        return known | {"digest": path.name, "bytes": path.stat().st_size, "created_s": created_s}

    def _page(self, owner: str, asked: Listing) -> dict[str, Any]:
        """A part of the list of a caller's files. Raises NotFound if the one that it comes after is not in the list."""
        found = []
        for notes in self._folder(owner).glob("*.json"):
            with suppress(FileNotFoundError):
                if (known := self._read(notes.with_suffix(""))) and asked.purpose in (None, known["purpose"]):
                    found.append(known)
        found.sort(key=lambda known: (known["created_s"], known["digest"]), reverse=asked.order == "desc")
        ids, start = [f"file-{known['digest']}" for known in found], 0
        if asked.after is not None:
            if asked.after not in ids:
                raise NotFound(field="after", limit="a file of this list", value=asked.after)
            start = ids.index(asked.after) + 1
        page = [self._object(known) for known in found[start : start + asked.limit]]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        has_more = start + len(page) < len(found)
        return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": has_more}

    def _object(self, known: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"file-{known['digest']}",
            "object": "file",
            "bytes": known["bytes"],
            "created_at": int(known["created_s"]),
            "expires_at": int(known["created_s"] + self._limits.expires_s),
            "filename": known["filename"],
            "purpose": known["purpose"],
            "status": "processed",
        }

    def _delete_expired(self, root: Path) -> None:
        for path in root.glob("*/*"):
            try:
                if path.stat().st_mtime + self._limits.expires_s < time.time():
                    path.unlink(missing_ok=True)
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("an expired file cannot be deleted", path=str(path), error=str(error))

    def _delete(self, path: Path) -> None:
        for each in (path.with_name(f"{path.name}.json"), path):
            each.unlink(missing_ok=True)
