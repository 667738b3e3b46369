"""Arrays on the wire: element types, splitting an array into pieces, and collecting pieces in a buffer.

Arrays are memoryviews of raw little-endian bytes in C order. This module knows neither torch nor protobuf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import Enum

import numpy as np

from gridsieve.common.contract.errors import PeerContract

PIECE_BYTES = 2**20
MAX_PIECE_BYTES = 2**21
MAX_ARRAY_BYTES = 2**34
MAX_AXES = 8


class DType(Enum):
    """Element types on the wire. The value is the size of an element in bytes, and its name."""

    UINT8 = (1, "uint8")
    INT32 = (4, "int32")
    INT64 = (8, "int64")
    FLOAT16 = (2, "float16")
    BFLOAT16 = (2, "bfloat16")
    FLOAT32 = (4, "float32")

    @property
    def itemsize(self) -> int:
        return self.value[0]

    @property
    def label(self) -> str:
        return self.value[1]


def shape_of(sent: Sequence[int]) -> tuple[int, ...]:
    """A shape that a peer sent. Raises PeerContract for more than MAX_AXES axes, before anything loops over them."""
    if len(sent) > MAX_AXES:
        raise PeerContract(f"an array of {len(sent)} axes is not allowed, at most {MAX_AXES} are")
    return tuple(sent)


def size_bytes(dtype: DType, shape: Sequence[int]) -> int:
    """Size of an array. Raises PeerContract for too many axes, a negative axis, or an array above 16 GiB."""
    size = dtype.itemsize * math.prod(shape_of(shape))
    if any(axis < 0 for axis in shape) or size > MAX_ARRAY_BYTES:
        raise PeerContract(f"an array of shape {list(shape)} and {size} bytes is not allowed")
    return size


def pieces(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """(offset, piece) of at most PIECE_BYTES each, at least one, in order."""
    flat = data.cast("B")
    for offset in range(0, max(1, flat.nbytes), PIECE_BYTES):
        yield offset, flat[offset : offset + PIECE_BYTES]


class TensorBuffer:
    """Collects the pieces of one array, in order, in a buffer that is allocated once, or holds one that came whole.

    pieces:  [0 ........ 1 MiB)[1 MiB ..... 2 MiB)[2 MiB .. end)
    received ───────────────────▲ the next piece must start here
    """

    def __init__(self, dtype: DType, shape: Sequence[int], whole: memoryview | None = None) -> None:
        """whole: all bytes of the array, which may be read only."""
        self.dtype = dtype
        self.shape = tuple(shape)
        if whole is not None:
            self.data, self.received_bytes = whole, whole.nbytes
            return
        # np.empty uses huge pages and does not fill with zeros: every byte is written before it is read.
        self.data = np.empty(size_bytes(dtype, shape), np.uint8).data
        self.received_bytes = 0

    @property
    def complete(self) -> bool:
        return self.received_bytes == self.data.nbytes

    def copy_piece(self, dtype: DType, shape: Sequence[int], offset_bytes: int, data: bytes) -> None:
        """Copies a piece into the buffer. Raises PeerContract unless it is the next piece of this array."""
        sent = shape_of(shape)
        if dtype is not self.dtype or sent != self.shape:
            raise PeerContract(
                f"a piece of {dtype.label} {list(sent)} was sent for an array of {self.dtype.label} {list(self.shape)}"
            )
        if offset_bytes != self.received_bytes:
            raise PeerContract(f"a piece starts at byte {offset_bytes}, the next must start at {self.received_bytes}")
        if len(data) > MAX_PIECE_BYTES:
            raise PeerContract(f"a piece has {len(data)} bytes, at most {MAX_PIECE_BYTES} are allowed")
        end = offset_bytes + len(data)
        if end > self.data.nbytes or (not data and not self.complete):
            raise PeerContract(f"a piece of {len(data)} bytes at {offset_bytes} does not fit {self.data.nbytes} bytes")
        self.data[offset_bytes:end] = data
        self.received_bytes = end
