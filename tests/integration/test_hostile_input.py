"""Hostile input to three real processes: clear refusals that reveal nothing of the inside, and no work done for it."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Image, Video
from gridsieve.common.contract import errors
from tests import media
from tests.integration.conftest import DECODE_MEMORY_BYTES, idle, metric
from tests.integration.fleet import HELD, Stack, until

ROOT = Path(__file__).parents[2]
INSIDE = re.compile(
    r"0x[0-9a-f]{6,}|site-packages|<\S.* object at|Traceback|\.py\b|memfd|/proc/|\[Errno|errno|\bNone\b"
)


@pytest.fixture(scope="session")
def bad_root(media_root: Path) -> Path:
    """The media root with files in it that cannot be read."""
    (media_root / "broken.mp4").write_bytes(truncated_clip())
    (media_root / "noise.mp4").write_bytes(b"\x00\x01\x02" * 500)
    (media_root / "empty.mp4").write_bytes(b"")
    (media_root / "folder.mp4").mkdir()
    (media_root / "circle.mp4").symlink_to("circle.mp4")
    (media_root / "out.mp4").symlink_to("/etc/passwd")
    return media_root


def truncated_clip() -> bytes:
    """Its index lists frames that are cut off."""
    whole = media.clip(64)
    start = whole.index(b"mdat")
    return whole[: start + (len(whole) - start) // 3]


FILES = ("broken.mp4", "noise.mp4", "empty.mp4", "folder.mp4", "circle.mp4", "out.mp4", "missing.mp4")
BAD: dict[str, Callable[[], Video | Image]] = {
    **{f"the video {path}": lambda path=path: Video(server_path=path) for path in FILES},
    **{f"the picture {path}": lambda path=path: Image(server_path=path) for path in FILES},
    "a path above the root": lambda: Video(server_path="../x.mp4"),
    "an absolute path": lambda: Video(server_path="/etc/shadow"),
    "a very long path": lambda: Video(server_path="a" * 5000),
    "a path with a zero byte": lambda: Video(server_path="clip.mp4\0"),
    "a file as a folder": lambda: Video(server_path="clip.mp4/clip.mp4"),
    "noise": lambda: Video(data=b"\x00\x01\x02" * 1000),
    "a picture of noise": lambda: Image(data=b"\x89PNG\r\n\x1a\n" + bytes(100)),
    "a truncated picture": lambda: Image(data=media.picture(64, 64)[:200]),
    "a truncated video": lambda: Video(data=truncated_clip()),
    "a negative rate": lambda: Video(data=media.picture(8, 8), fps=-1),
    "a URL of this machine": lambda: Video(url="http://127.0.0.1:1/x.mp4"),
    "a URL of another scheme": lambda: Video(url="file:///etc/passwd"),
    "a URL of an unknown host": lambda: Video(url="http://nobody.invalid/x.mp4"),
    "an empty data URI": lambda: Image(url="data:image/png;base64,"),
    "a broken data URI": lambda: Image(url="data:image/png;base64,%%%"),
}


async def test_a_refusal_names_the_part_and_nothing_of_the_inside(
    client: GridsieveClient, bad_root: Path, tiny_checkpoint: Path
) -> None:
    """It may repeat a path as it was given, not where it lies on the server."""
    for name, make in BAD.items():
        with pytest.raises(errors.GridsieveError) as refused:
            await client.ask(make(), "What moves?", timeout_s=60)
        text = str(refused.value)
        assert text.startswith("prompt.messages[0].parts[0]"), (name, text)
        assert not INSIDE.search(text), (name, text)
        for path in (bad_root, tiny_checkpoint, ROOT, Path.home()):
            assert str(path) not in text, (name, text)
        assert len(text) < 1600, name


COUNTS = {
    "sizes": (b"stsz", 12),
    "times": (b"stts", 12),
    "entries of times": (b"stts", 8),
    "chunks": (b"stco", 8),
    "samples in a chunk": (b"stsc", 16),
    "length": (b"mdhd", 20),
}


async def test_two_billion_frames_in_a_header_cost_nothing(client: GridsieveClient) -> None:
    """The file is refused, or answered about the frames that are there."""
    for name, (box, offset) in COUNTS.items():
        data = bytearray(media.clip(8))
        start = data.index(box) + offset
        data[start : start + 4] = (2**31 - 1).to_bytes(4, "big")
        try:
            answer = await client.ask(Video(data=bytes(data)), "What moves?", max_new_tokens=1, timeout_s=30)
        except (errors.MediaRejected, errors.MediaDamaged):
            continue
        assert answer.usage.media[0].grid.t <= 4, name


async def test_a_decompression_bomb_stops_at_the_memory_limit_of_its_worker(
    stack: Stack, client: GridsieveClient
) -> None:
    replaced = partial(metric, stack, "preprocessing", "gridsieve_preprocessing_worker_restarts_total", reason="memory")
    before, bomb = replaced(), black_png(8000, 8000)
    assert len(bomb) < 2**20
    limit = f"image cannot be decoded: it needed more than {DECODE_MEMORY_BYTES >> 20} MiB"
    with pytest.raises(errors.MediaRejected, match=limit):
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
