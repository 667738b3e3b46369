"""Opens the media of a prompt, and tells images, videos and sounds apart: bytes decide, not what the request says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import Modality
from gridsieve.services.preprocessing.conversation import FileUrl, MediaRequest, Upload
from gridsieve.services.preprocessing.items.readers import Readers
from gridsieve.services.preprocessing.layouts.family import Family
from gridsieve.services.preprocessing.prompt.embeds import Embeds
from gridsieve.services.preprocessing.sources.digests import Digests
from gridsieve.services.preprocessing.sources.source import Source, bytes_source, path_source
from gridsieve.services.preprocessing.video.pictures import PictureIndex, is_picture


@dataclass(frozen=True, slots=True)
class Opened:
    """A medium whose modality is known. source: None for embeddings. picture: of an image."""

    request: MediaRequest
    modality: Modality
    source: Source | None = None
    picture: PictureIndex | None = None


class Opener:
    """Opens media for one model.

    media_root: of paths and file URLs. upload_root: of uploaded files. media_max_bytes: limit on files below them;
    larger ones are rejected unread. known: their digests, kept from one request to the next.
    """

    def __init__(
        self,
        family: Family,
        media_root: Path | None,
        upload_root: Path | None,
        media_max_bytes: float,
        known: Digests,
    ) -> None:
        self._family = family
        self._media_root = media_root
        self._upload_root = upload_root
        self._media_max_bytes = media_max_bytes
        self._known = known

    def open(self, request: MediaRequest, files: ExitStack, readers: Readers) -> Opened:
        """files: closes what is opened here; sources that the request brings are the caller's.

        Raises InvalidRequest for a wish that no video of this model fulfils, MediaRejected, MediaForbidden, Overloaded,
        and what the readers raise.
        """
        readers.check_cancelled()
        if isinstance(request.location, Embeds):
            return Opened(request, request.modality)
        self._check_wish(request)
        source = self._source(request, files, readers.check_cancelled)
        if request.modality is Modality.AUDIO:
            return Opened(request, Modality.AUDIO, source)
        if request.frames is not None or not is_picture(source.head):
            return Opened(request, Modality.VIDEO, source)
        picture = readers.pictures(source, ())
        if picture.moves and request.modality is Modality.VIDEO:
            return Opened(request, Modality.VIDEO, source)
        return Opened(request, Modality.IMAGE, source, picture)

    def _source(self, request: MediaRequest, files: ExitStack, check_cancelled: Callable[[], None]) -> Source:
        read = check_cancelled, self._media_max_bytes, self._known
        match request.location:
            case Source() as fetched:
                return fetched
            case bytes() as data:
                source = bytes_source(request.name, data)
            case str() as path:
                source = path_source(request.name, path, self._media_root, *read)
            case FileUrl(path):
                source = path_source(request.name, path, self._media_root, *read, "url")
            case Upload(path):
                source = path_source(request.name, path, self._upload_root, *read, "url", "--upload-root")
            case _:
                raise AssertionError(f"{request.name} was neither fetched nor received")
        files.callback(source.close)
        return source

    def _check_wish(self, request: MediaRequest) -> None:
        if request.sampling.max_slices is not None and not self._family.takes_max_slices:
            raise InvalidRequest("is not a setting of this model", field=f"{request.name}.frame_sampling.max_slices")
        token, wished = self._family.token_px**2, request.sampling.max_pixels
        if wished is not None and wished < token:
            field, limit = f"{request.name}.frame_sampling.max_pixels", f"at least {token}, the pixels of one token"
            raise InvalidRequest(field=field, limit=limit, value=wished)
