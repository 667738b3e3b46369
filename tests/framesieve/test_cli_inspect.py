"""`framesieve inspect` against hand-written services: the picture, the counts, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import Result

from framesieve.cli.contact_sheet import contact_sheet
from framesieve.v1 import (
    encoder_pb2,
)
from tests.framesieve.fake_services import SLICES_APART, FakeServices


def test_inspect_writes_a_picture_and_prints_the_counts(
    framesieve: Callable[..., Result], services: FakeServices, address: str, clip: str, tmp_path: Path
) -> None:
    output = tmp_path / "kept.png"
    places = ["--preprocessing", address, "--encoder", address]
    result = framesieve("inspect", clip, "--pruning-rate", "0.5", "-o", str(output), *places)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{output}: 4 of 8 tokens kept, 2 slices of 2 × 2\n"
    with Image.open(output) as picture:
        assert picture.format == "PNG"
    encode = next(each for each in services.asked if isinstance(each, encoder_pb2.EncodePrompt))
    assert (encode.pruning.rate, encode.pruning.method) == (0.5, "evs")
    assert encode.prompt.messages[0].parts[0].video.data == b"film"


def test_inspect_names_a_url_without_its_query(
    framesieve: Callable[..., Result],
    services: FakeServices,
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captions: list[str] = []

    def drawn(*arguments: Any) -> Any:
        captions.append(arguments[4])
        return contact_sheet(*arguments)

    monkeypatch.setattr("framesieve.cli.inspection.contact_sheet", drawn)
    places = ["--preprocessing", address, "--encoder", address, "-o", str(tmp_path / "kept.png")]
    for url in ("https://a.test/clips/a%20b.mp4?signature=secret", "data:video/mp4,secret"):
        assert framesieve("inspect", url, *places).exit_code == 0
        assert {each.messages[0].parts[0].video.url for each in services.asked if hasattr(each, "messages")} >= {url}
    assert captions == ["a b.mp4", "data:"]


def test_inspect_counts_by_slice_for_machines(
    framesieve: Callable[..., Result], services: FakeServices, address: str, clip: str, tmp_path: Path
) -> None:
    services.kept = [0, 1, 2, 3, 5, 7]
    places = ["--preprocessing", address, "--encoder", address, "-o", str(tmp_path / "kept.png")]
    told = json.loads(framesieve("inspect", clip, "--pruning-rate", "0.25", *places, "--json").stdout)
    assert (told["tokens"], told["kept_tokens"], told["kept_tokens_by_slice"]) == (8, 6, [4, 2])
    assert told["repaired_frames"] == 2


def test_inspect_refuses_what_no_request_can_hold(
    framesieve: Callable[..., Result], address: str, clip: str, tmp_path: Path
) -> None:
    places = ["--preprocessing", address, "--encoder", address, "-o", str(tmp_path / "kept.png")]
    result = framesieve("inspect", clip, "--max-frames", str(2**33), *places)
    assert result.exit_code == 1
    assert result.stderr == "INVALID_REQUEST: FrameSampling.max_frames must be a 32-bit integer, got 8589934592\n"


def test_inspect_names_a_picture_whose_name_is_no_text(
    framesieve: Callable[..., Result], address: str, clip: str, tmp_path: Path
) -> None:
    output = tmp_path / "kept\udcff.png"
    result = framesieve("inspect", clip, "--preprocessing", address, "--encoder", address, "-o", str(output))
    assert result.exit_code == 0
    assert r"kept\udcff.png: 4 of 8 tokens kept" in result.stdout
    assert output.exists()


def test_inspect_understands_that_an_absent_kept_is_everything(
    framesieve: Callable[..., Result], services: FakeServices, address: str, clip: str, tmp_path: Path
) -> None:
    services.kept = None
    places = ["--preprocessing", address, "--encoder", address, "-o", str(tmp_path / "kept.png")]
    assert "8 of 8 tokens kept" in framesieve("inspect", clip, "--pruning-rate", "0", *places).stdout


@pytest.mark.parametrize(
    ("method", "kept", "by_slice"),
    [
        ("evs", [0, 1, 2, 3, 4, 5], [6, 0]),
        ("vidcom2", [4, 6, 9], [1, 2]),
        ("random", [1, 3, 4, 7, 8, 11], [3, 3]),
        ("none", None, [6, 6]),
    ],
)
def test_inspect_draws_slices_that_stand_apart_by_every_method(
    framesieve: Callable[..., Result],
    services: FakeServices,
    address: str,
    clip: str,
    tmp_path: Path,
    method: str,
    kept: list[int] | None,
    by_slice: list[int],
) -> None:
    services.plan, services.kept = SLICES_APART, kept
    places = ["--preprocessing", address, "--encoder", address, "-o", str(tmp_path / "kept.png")]
    told = json.loads(
        framesieve("inspect", clip, "--method", method, "--pruning-rate", "0.75", *places, "--json").stdout
    )
    assert told["kept_tokens_by_slice"] == by_slice
    assert told["pruning"] == {"rate": 0.75, "method": method, "seed": None}
    encode = next(each for each in services.asked if isinstance(each, encoder_pb2.EncodePrompt))
    assert encode.pruning.method == method
    with Image.open(tmp_path / "kept.png") as picture:
        assert picture.format == "PNG"


@pytest.mark.parametrize("kept", [[0, 1, 2], [0, 1, 3, 2], [0, 1, 2, 8]])
def test_inspect_refuses_an_encoder_that_breaks_the_contract(
    framesieve: Callable[..., Result],
    services: FakeServices,
    address: str,
    clip: str,
    tmp_path: Path,
    kept: list[int],
) -> None:
    services.kept = kept
    places = ["--preprocessing", address, "--encoder", address, "-o", str(tmp_path / "kept.png")]
    result = framesieve("inspect", clip, "--pruning-rate", "0.5", *places)
    assert result.exit_code == 1
    assert result.stderr.startswith("PEER_CONTRACT: the encoder kept")
