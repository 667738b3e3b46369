"""A Watch call of preprocessing: bytes of a stream, or its URL, go there, and frames come back.

Everything that comes is checked; violations raise PeerContract.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

from gridsieve.common.channels import end_writing, read_from, write_to
from gridsieve.common.contract.errors import PeerContract
from gridsieve.common.contract.limits import MAX_RAW_PIXELS
from gridsieve.common.contract.requests import file_pieces
from gridsieve.common.contract.tensors import DType, TensorBuffer, shape_of
from gridsieve.common.contract.wire import add_chunk, buffer_for
from gridsieve.v1 import preprocessing_pb2
from gridsieve.v1.preprocessing_pb2 import WatchRequest

_STAGE = "preprocessing"


@dataclass(frozen=True, slots=True, eq=False)
class WatchedFrame:
    """picture: a file, see `ppm_header`. time_s: on the stream's clock. replaced: frames left out before it.
    filmed_s: when it was filmed by the camera's own clock, in seconds since 1970; None: the stream does not say."""

    picture: bytes | bytearray
    time_s: float
    replaced: int
    filmed_s: float | None = None


class Watch:
    """One call. url: empty where `send` brings the stream. The caller must `cancel` it."""

    def __init__(self, call: Any, fps: float, url: str) -> None:
        """call: of Watch, just begun."""
        self._call = call
        self._opening = preprocessing_pb2.WatchOpen(fps=fps, url=url)
        self._last_s = -math.inf

    async def open(self) -> None:
        await write_to(self._call, WatchRequest(open=self._opening))

    async def send(self, data: bytes) -> None:
        """The next bytes of the stream. Does nothing if the call has ended; reading from it tells how."""
        for piece in file_pieces([data]):
            await write_to(self._call, WatchRequest(data=piece))

    async def end(self) -> None:
        """No more bytes follow."""
        await end_writing(self._call)

    def cancel(self) -> None:
        self._call.cancel()

    async def events(self) -> AsyncIterator[WatchedFrame | int]:
        """Frames as they come; and how many of the bytes that were sent are read, where `send` brings them.

        Ends with the stream. Raises the service's errors.
        """
        buffer: TensorBuffer | None = None
        while (response := await read_from(self._call, _STAGE)) is not None:
            match response.WhichOneof("response"):
                case "read_bytes":
                    yield response.read_bytes
                case "frame":
                    if buffer is None:
                        buffer, first = _begun(response.frame), response.frame
                    add_chunk(buffer, response.frame.chunk)
                    if buffer.complete:
                        whole, buffer = buffer, None
                        yield self._frame(whole, first)
                case other:
                    raise PeerContract(f"preprocessing sent {other} of a stream")

    def _frame(self, whole: TensorBuffer, first: preprocessing_pb2.WatchedFrame) -> WatchedFrame:
        if not (math.isfinite(first.time_s) and first.time_s >= self._last_s and first.replaced >= 0):
            raise PeerContract(f"a frame at {first.time_s} s, with {first.replaced} replaced, follows {self._last_s} s")
        filmed_s = first.filmed_s if first.HasField("filmed_s") else None
        if not math.isfinite(filmed_s or 0):
            raise PeerContract(f"a frame was filmed at {filmed_s} s")
        self._last_s = first.time_s
        picture = cast(bytearray, whole.data.obj)
        return WatchedFrame(picture, first.time_s, first.replaced, filmed_s)


def ppm_header(width_px: int, height_px: int) -> bytes:
    """What comes before the pixels, of 3 bytes each, in a picture file of Netpbm's P6."""
    return b"P6\n%d %d\n255\n" % (width_px, height_px)


def _begun(first: preprocessing_pb2.WatchedFrame) -> TensorBuffer:
    """A buffer for the frame that a message begins: the end of a picture file."""
    shape = shape_of(first.chunk.shape)
    if len(shape) != 3 or shape[2] != 3 or min(shape) < 1 or shape[0] * shape[1] > MAX_RAW_PIXELS:
        raise PeerContract(f"a frame of a stream has the shape {list(shape)}")
    buffer, header = buffer_for(first.chunk, (DType.UINT8,), shape), ppm_header(shape[1], shape[0])
    # To copy the pixels into a file once they are complete would hold up the event loop.
    picture = bytearray(len(header) + buffer.data.nbytes)
    picture[: len(header)] = header
    buffer.data = memoryview(picture)[len(header) :]
    return buffer
