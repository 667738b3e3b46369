"""Pictures of every format become upright RGB as in transformers, and bad ones are rejected."""

from __future__ import annotations

import io
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from common.contract.errors import MediaDamaged, MediaRejected
from services.preprocessing.sources.source import Source, bytes_source
from services.preprocessing.video.pictures import decode_picture, read_picture

ORIENTATION = 0x0112


def scene(mode: str = "RGB") -> Image.Image:
    """A random 40×24 picture, partly transparent if the mode allows it."""
    generator = np.random.default_rng(0)
    picture = Image.fromarray(generator.integers(0, 256, (24, 40, 4), np.uint8), "RGBA")
    return picture if mode == "RGBA" else picture.convert(mode)


def source_of(picture: Image.Image, format: str = "PNG", **options: Any) -> Source:  # noqa: A002
    file = io.BytesIO()
    picture.save(file, format, **options)
    return bytes_source("image", file.getvalue())


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "LA", "I;16"])
def test_every_mode_becomes_the_rgb_of_transformers(mode: str) -> None:
    picture = Image.fromarray(np.arange(960, dtype=np.uint16).reshape(24, 40)) if mode == "I;16" else scene(mode)
    source = source_of(picture)
    with Image.open(source.open()) as read:
        expected = convert_to_rgb(read, return_numpy=True)
    found = read_picture(source)
    assert (found.height_px, found.width_px) == (24, 40)
    assert np.array_equal(decode_picture(source, found), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_picture_is_turned_upright_by_its_exif(orientation: int, format: str) -> None:  # noqa: A002
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


def test_transparency_of_a_palette_becomes_white() -> None:
    picture = Image.new("P", (8, 8), 0)
    picture.putpalette([255, 0, 0, 0, 0, 255])
    source = source_of(picture, transparency=0)
    assert decode_picture(source, read_picture(source)).min() == 255


def test_an_animation_yields_its_first_picture() -> None:
    first, second = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    source = source_of(first, "GIF", save_all=True, append_images=[second])
    pixels = decode_picture(source, read_picture(source))
    assert pixels[4, 4].tolist() == [255, 0, 0]


@pytest.mark.parametrize(
    "data", [b"no picture", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"\x89PNG\r\n\x1a\n" + bytes(64)]
)
def test_an_unreadable_picture_is_rejected(data: bytes) -> None:
    with pytest.raises(MediaRejected, match="not a readable image"):
        read_picture(bytes_source("image", data))


def test_a_truncated_picture_is_damaged() -> None:
    whole = source_of(scene().resize((400, 240)), "JPEG")
    with whole.open() as file:
        data = file.read()
    source = bytes_source("image", data[: len(data) // 2])
    with pytest.raises(MediaDamaged, match="cannot be decoded"):
        decode_picture(source, read_picture(source))


@pytest.mark.parametrize(
    ("width", "height", "why"),
    [
        (12000, 7000, "12000×7000 pixels, at most 67108864 are allowed"),
        (60000, 60000, "far more pixels than the 67108864"),  # Pillow's own limit
    ],
)
def test_a_picture_above_the_limit_is_rejected_by_its_header(width: int, height: int, why: str) -> None:
    file = io.BytesIO()
    Image.new("1", (1, 1)).save(file, "PNG")
    data = bytearray(file.getvalue())
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    with pytest.raises(MediaRejected, match=why):
        read_picture(bytes_source("image", bytes(data)))
