"""Pictures of every format become upright RGB as in transformers, and bad ones are rejected."""

from __future__ import annotations

import io
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from gridsieve.common.contract.errors import MediaDamaged, MediaRejected
from gridsieve.services.preprocessing.sources.source import Source, bytes_source
from gridsieve.services.preprocessing.video.pictures import decode_picture, read_picture
from tests import media

ORIENTATION = 0x0112


def scene(mode: str = "RGB") -> Image.Image:
    """A random 40×24 picture, partly transparent if the mode allows it."""
    generator = np.random.default_rng(0)
    picture = Image.fromarray(generator.integers(0, 256, (24, 40, 4), np.uint8), "RGBA")
    return picture if mode == "RGBA" else picture.convert(mode)


def source_of(picture: Image.Image, format: str = "PNG", **options: Any) -> Source:
    file = io.BytesIO()
    picture.save(file, format, **options)
    return bytes_source("image", file.getvalue())


@pytest.mark.parametrize(
    ("mode", "options"),
    [("RGB", {}), ("L", {}), ("1", {}), ("P", {}), ("P", {"transparency": 0}), ("RGBA", {}), ("LA", {}), ("I;16", {})],
)
def test_every_mode_becomes_the_rgb_of_transformers(mode: str, options: dict[str, Any]) -> None:
    picture = Image.fromarray(np.arange(960, dtype=np.uint16).reshape(24, 40)) if mode == "I;16" else scene(mode)
    source = source_of(picture, **options)
    with Image.open(source.open()) as read:
        expected = convert_to_rgb(read, return_numpy=True)
    found = read_picture(source)
    assert (found.height_px, found.width_px) == (24, 40)
    assert np.array_equal(decode_picture(source, found), expected)


def test_readers_of_all_formats_are_imported_before_a_worker_is_confined(tmp_path: Path) -> None:
    """Then it may read no more packages, where these lie outside of Python's own folders."""
    for name in ("avif", "bmp", "gif", "jpeg", "png", "ppm", "tiff", "webp"):
        scene().save(tmp_path / f"picture.{name}")
    script = """
import pathlib, sys
from gridsieve.services.preprocessing.sources.source import bytes_source
from gridsieve.services.preprocessing.video.pictures import decode_picture, read_picture
from gridsieve.services.preprocessing.workers import worker
before = set(sys.modules)
for path in pathlib.Path(sys.argv[1]).iterdir():
    source = bytes_source("image", path.read_bytes())
    decode_picture(source, read_picture(source))
print(*(name for name in set(sys.modules) - before if "." in name))
"""
    ran = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    assert ran.stdout == "\n"


@pytest.mark.parametrize(
    ("format", "orientation"), [*(("JPEG", each) for each in range(1, 9)), ("PNG", 6), ("WEBP", 5), ("TIFF", 8)]
)
def test_a_picture_is_turned_upright_by_its_exif(orientation: int, format: str) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    options = {"lossless": True} if format == "WEBP" else {}
    source = source_of(scene(), format, exif=exif, **options)
    with Image.open(source.open()) as read:
        read.load()
        expected = np.asarray(ImageOps.exif_transpose(read).convert("RGB"))
    found = read_picture(source)
    assert (found.height_px, found.width_px) == expected.shape[:2]
    assert np.array_equal(decode_picture(source, found), expected)


@pytest.mark.parametrize(
    "data", [b"no picture", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"\x89PNG\r\n\x1a\n" + bytes(64)]
)
def test_an_unreadable_picture_is_rejected(data: bytes) -> None:
    with pytest.raises(MediaRejected, match="cannot be read as an image"):
        read_picture(bytes_source("image", data))


def test_a_truncated_picture_is_damaged() -> None:
    source = bytes_source("image", media.picture(400, 240)[:1000])
    with pytest.raises(MediaDamaged, match="cannot be decoded"):
        decode_picture(source, read_picture(source))


@pytest.mark.parametrize(("side", "why"), [(9000, "9000×9000 pixels, at most 67108864"), (60_000, "far more pixels")])
def test_a_picture_above_the_limit_is_rejected_by_its_header(side: int, why: str) -> None:
    data = bytearray(media.picture(1, 1))
    data[16:24] = side.to_bytes(4) * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4)
    with pytest.raises(MediaRejected, match=why):
        read_picture(bytes_source("image", bytes(data)))
