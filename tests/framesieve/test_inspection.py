"""`framesieve inspect` against hand-written services: the picture, the counts, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import Result

from framesieve.cli.contact_sheet import contact_sheet
from framesieve.v1 import encoder_pb2
from tests.framesieve.fake_services import SLICES_APART, FakeServices


@pytest.fixture
def inspect(framesieve: Callable[..., Result], address: str, tmp_path: Path) -> Callable[..., Result]:
    def run(media: str, *arguments: str) -> Result:
        places = ["--preprocessing", address, "--encoder", address]
        return framesieve("inspect", media, *places, "-o", str(tmp_path / "kept.png"), *arguments)

    return run


def test_inspect_writes_a_picture_and_prints_the_counts(
    inspect: Callable[..., Result], services: FakeServices, clip: str, tmp_path: Path
) -> None:
    result = inspect(clip, "--pruning-rate", "0.5")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{tmp_path}/kept.png: 4 of 8 tokens kept, 2 slices of 2 × 2\n"
    with Image.open(tmp_path / "kept.png") as picture:
        assert picture.format == "PNG"
    encode = next(each for each in services.asked if isinstance(each, encoder_pb2.EncodePrompt))
    assert (encode.pruning.rate, encode.pruning.method) == (0.5, "evs")
    assert encode.prompt.messages[0].parts[0].video.data == b"film"


def test_the_title_of_a_url_has_no_query(
    inspect: Callable[..., Result], services: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []

    def drawn(*arguments: Any) -> Any:
        titles.append(arguments[4])
        return contact_sheet(*arguments)

    monkeypatch.setattr("framesieve.cli.inspection.contact_sheet", drawn)
    for url in ("https://a.test/clips/a%20b.mp4?signature=secret", "data:video/mp4,secret"):
        assert inspect(url).exit_code == 0
        assert {each.messages[0].parts[0].video.url for each in services.asked if hasattr(each, "messages")} >= {url}
    assert titles == ["a b.mp4", "data:"]


def test_an_output_name_that_is_not_unicode_is_printed_escaped(
    inspect: Callable[..., Result], clip: str, tmp_path: Path
) -> None:
    result = inspect(clip, "-o", str(tmp_path / "kept\udcff.png"))
    assert result.exit_code == 0
    assert r"kept\udcff.png: 4 of 8 tokens kept" in result.stdout
    assert (tmp_path / "kept\udcff.png").exists()


@pytest.mark.parametrize(
    ("method", "kept", "by_slice"),
    [
        ("evs", [0, 1, 2, 3, 4, 5], [6, 0]),
        ("vidcom2", [4, 6, 9], [1, 2]),
        ("random", [1, 3, 4, 7, 8, 11], [3, 3]),
        ("none", None, [6, 6]),  # without the field, all tokens are kept
    ],
)
def test_json_counts_tokens_by_slice_for_every_method(
    inspect: Callable[..., Result],
    services: FakeServices,
    clip: str,
    tmp_path: Path,
    method: str,
    kept: list[int] | None,
    by_slice: list[int],
) -> None:
    services.plan, services.kept = SLICES_APART, kept
    printed = json.loads(inspect(clip, "--method", method, "--pruning-rate", "0.75", "--json").stdout)
    assert printed["kept_tokens_by_slice"] == by_slice
    assert (printed["tokens"], printed["kept_tokens"], printed["repaired_frames"]) == (12, sum(by_slice), 2)
    assert printed["pruning"] == {"rate": 0.75, "method": method, "seed": None}
    with Image.open(tmp_path / "kept.png") as picture:
        assert picture.format == "PNG"


@pytest.mark.parametrize("kept", [[0, 1, 2], [0, 1, 3, 2], [0, 1, 2, 8]], ids=["fewer", "unordered", "out of range"])
def test_an_encoder_that_breaks_the_contract_is_an_error(
    inspect: Callable[..., Result], services: FakeServices, clip: str, kept: list[int]
) -> None:
    services.kept = kept
    result = inspect(clip, "--pruning-rate", "0.5")
    assert result.exit_code == 1
    assert result.stderr.startswith("PEER_CONTRACT: the encoder kept")
