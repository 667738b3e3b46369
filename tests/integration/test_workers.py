"""Media that fill a worker process fail their own request only."""

from __future__ import annotations

import struct
import zlib
from functools import partial

import pytest

from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Image, Video
from gridsieve.common.contract import errors
from tests import media
from tests.integration.conftest import idle, metric
from tests.integration.fleet import HELD, Stack, until

MIB = 2**20


async def test_a_decompression_bomb_stops_at_the_memory_limit_of_its_worker(
    stack: Stack, client: GridsieveClient
) -> None:
    replaced = partial(metric, stack, "preprocessing", "gridsieve_preprocessing_worker_restarts_total", reason="memory")
    before, bomb = replaced(), black_png(8000, 8000)
    assert len(bomb) < MIB
    with pytest.raises(errors.MediaRejected, match="image cannot be decoded: it needed more than 192 MiB"):
        await client.ask(Image(data=bomb), "What is this?", timeout_s=60)
    await until(lambda: replaced() == before + 1)
    answer = await client.ask(Video(data=media.clip()), "What moves?", max_new_tokens=2, timeout_s=60)
    assert answer.usage.completion_tokens >= 1
    await idle(stack)
    for name in HELD["preprocessing"]:
        assert metric(stack, "preprocessing", f"gridsieve_preprocessing_{name}") == 0


def black_png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    packed = zlib.compress(bytes(3 * width + 1) * height, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
