"""H.264 whose frames are coded as pairs of fields (PAFF), which none of FFmpeg's encoders makes.

All macroblocks hold plain samples (I_PCM), so no transform is needed. Source: ITU-T H.264, 7.3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MACROBLOCK = 16
_I_PCM = 25
_FRAME_NUM_BITS = 4


class _Bits:
    def __init__(self) -> None:
        self._bits: list[int] = []

    def u(self, value: int, bits: int = 1) -> _Bits:
        self._bits += [value >> place & 1 for place in reversed(range(bits))]
        return self

    def ue(self, *values: int) -> _Bits:
        """Exponential-Golomb codes."""
        for value in values:
            bits = (value + 1).bit_length()
            self.u(0, bits - 1).u(value + 1, bits)
        return self

    def align(self) -> _Bits:
        return self.u(0, -len(self._bits) % 8)

    def samples(self, values: NDArray[np.uint8]) -> _Bits:
        self._bits += np.unpackbits(values.reshape(-1)).tolist()
        return self

    def nal(self, header: int) -> bytes:
        """A NAL unit with its start code, trailing bits and emulation prevention."""
        data = np.packbits(self.u(1).align()._bits).tobytes()
        escaped, zeros = bytearray(), 0
        for byte in data:
            if zeros >= 2 and byte <= 3:
                escaped.append(3)
                zeros = 0
            escaped.append(byte)
            zeros = zeros + 1 if byte == 0 else 0
        return b"\0\0\0\1" + bytes([header]) + bytes(escaped)


def access_units(pictures: Sequence[NDArray[np.uint8]]) -> list[tuple[bytes, bytes]]:
    """Two fields for each picture, grey uint8 [H, W], whose sides are multiples of 32 and 16."""
    height, width = pictures[0].shape
    return [
        (
            (_parameters(height, width) if number == 0 else b"") + _field(picture[::2], number, bottom=False),
            _field(picture[1::2], number, bottom=True),
        )
        for number, picture in enumerate(pictures)
    ]


def _parameters(height: int, width: int) -> bytes:
    sequence = _Bits().u(77, 8).u(0, 8).u(30, 8).ue(0, _FRAME_NUM_BITS - 4, 2, 1).u(0)
    sequence.ue(width // _MACROBLOCK - 1, height // _MACROBLOCK // 2 - 1).u(0).u(0).u(1).u(0).u(0)
    picture = _Bits().ue(0, 0).u(0).u(0).ue(0, 0, 0).u(0).u(0, 2).ue(0, 0, 0).u(1).u(0).u(0)
    return sequence.nal(0x67) + picture.nal(0x68)


def _field(rows: NDArray[np.uint8], number: int, bottom: bool) -> bytes:
    is_idr = number == 0 and not bottom
    bits = _Bits().ue(0, 7, 0).u(number % 2**_FRAME_NUM_BITS, _FRAME_NUM_BITS).u(1).u(bottom)
    if is_idr:
        bits.ue(0).u(0).u(0)
    else:
        bits.u(0)
    bits.ue(0, 1)  # quantiser as in the parameters; no deblocking
    grey = np.full(2 * (_MACROBLOCK // 2) ** 2, 128, np.uint8)
    for top in range(0, rows.shape[0], _MACROBLOCK):
        for left in range(0, rows.shape[1], _MACROBLOCK):
            block = rows[top : top + _MACROBLOCK, left : left + _MACROBLOCK]
            bits.ue(_I_PCM).align().samples(block).samples(grey)
    return bits.nal(0x65 if is_idr else 0x61)
