"""Arrays in pieces are reassembled, and wrong pieces are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridsieve.common.contract.errors import PeerContract
from gridsieve.common.contract.tensors import MAX_PIECE_BYTES, PIECE_BYTES, DType, TensorBuffer, pieces, size_bytes


@given(size=st.one_of(st.integers(0, 9), st.integers(PIECE_BYTES - 2, 3 * PIECE_BYTES + 2)))
def test_an_array_is_reassembled_from_its_pieces(size: int) -> None:
    data = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    buffer = TensorBuffer(DType.UINT8, (size,))
    for offset, piece in pieces(memoryview(data)):
        assert len(piece) <= PIECE_BYTES
        buffer.copy_piece(DType.UINT8, (size,), offset, bytes(piece))
    assert buffer.complete
    assert bytes(buffer.data) == data


def test_sizes_follow_the_element_type() -> None:
    sizes = {dtype.label: size_bytes(dtype, (3, 5)) for dtype in DType}
    assert sizes == {"uint8": 15, "int32": 60, "int64": 120, "float16": 30, "bfloat16": 30, "float32": 60}


@pytest.mark.parametrize(
    ("dtype", "shape", "offset", "data", "message"),
    [
        (DType.INT32, (8,), 4, b"1234", "was sent for"),
        (DType.UINT8, (9,), 4, b"1234", "was sent for"),
        (DType.INT32, (1,) * 10**6, 4, b"1234", "^an array of 1000000 axes is not allowed, at most 8 are$"),
        (DType.UINT8, (8,), 0, b"1234", "must start at 4"),
        (DType.UINT8, (8,), 4, b"12345", "does not fit"),
        (DType.UINT8, (8,), 4, b"", "does not fit"),
        (DType.UINT8, (8,), 4, b"x" * (MAX_PIECE_BYTES + 1), "at most"),
    ],
)
def test_a_piece_that_does_not_continue_the_array_is_refused(
    dtype: DType, shape: tuple[int, ...], offset: int, data: bytes, message: str
) -> None:
    buffer = TensorBuffer(DType.UINT8, (8,))
    buffer.copy_piece(DType.UINT8, (8,), 0, b"1234")
    with pytest.raises(PeerContract, match=message):
        buffer.copy_piece(dtype, shape, offset, data)
    assert buffer.received_bytes == 4


@pytest.mark.parametrize("shape", [(-1,), (2**20, 2**20), (2**62,) * 8, (2**62,) * 10**6])
def test_a_forged_shape_is_refused_before_anything_is_allocated(shape: tuple[int, ...]) -> None:
    with pytest.raises(PeerContract, match="not allowed"):
        TensorBuffer(DType.FLOAT32, shape)
