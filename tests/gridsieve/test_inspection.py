"""`gridsieve inspect` against hand-written services: the picture, the counts, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import Result

from gridsieve.cli.contact_sheet import contact_sheet
from gridsieve.common.contract.plan import Grid
from gridsieve.v1 import encoder_pb2, generation_pb2
from tests.gridsieve.fake_services import SLICED, SLICES_APART, FakeServices


@pytest.fixture
def inspect(gridsieve: Callable[..., Result], address: str, tmp_path: Path) -> Callable[..., Result]:
    def run(media: str, *arguments: str) -> Result:
        places = ["--preprocessing", address, "--encoder", address]
        return gridsieve("inspect", media, *places, "-o", str(tmp_path / "kept.png"), *arguments)

    return run


def test_inspect_writes_a_picture_and_prints_the_counts(
    inspect: Callable[..., Result], services: FakeServices, clip: str, tmp_path: Path
) -> None:
    name = tmp_path / "kept\udcff.png"  # not Unicode, so printed escaped
    result = inspect(clip, "--pruning-rate", "0.5", "-o", str(name))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.endswith(r"kept\udcff.png: 4 of 8 tokens kept, 2 slices of 2 × 2 tokens" + "\n")
    with Image.open(name) as picture:
        assert picture.format == "PNG"
    encode = next(each for each in services.asked if isinstance(each, encoder_pb2.EncodePrompt))
    assert (encode.pruning.rate, encode.pruning.method) == (0.5, "")
    assert encode.prompt.messages[0].parts[0].video.data == b"film"


def test_the_suffix_of_the_picture_decides_its_format(
    inspect: Callable[..., Result], clip: str, tmp_path: Path
) -> None:
    assert inspect(clip, "-o", str(tmp_path / "kept.JPG")).exit_code == 0
    with Image.open(tmp_path / "kept.JPG") as picture:
        assert picture.format == "JPEG"


def test_the_title_of_a_url_has_no_query_and_the_caption_says_what_chose(
    inspect: Callable[..., Result], services: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []

    def draw(*arguments: Any) -> Any:
        drawn.append(arguments)
        return contact_sheet(*arguments)

    monkeypatch.setattr("gridsieve.cli.inspection.contact_sheet", draw)
    for url in ("https://a.test/clips/a%20b.mp4?signature=secret", "data:video/mp4,secret"):
        result = inspect(url, "--pruning-threshold", "0.125")
        assert result.exit_code == 0, result.stderr
        assert {each.messages[0].parts[0].video.url for each in services.asked if hasattr(each, "messages")} >= {url}
    assert [each[4] for each in drawn] == ["a b.mp4", "data:"]
    caption = "pixel_change, before the tower, at threshold 0.125 keeps 4 of 8 tokens"
    assert drawn[0][5].startswith(caption)
    encode = next(each for each in services.asked if isinstance(each, encoder_pb2.EncodePrompt))
    assert (encode.pruning.rate, encode.pruning.method, encode.pruning.threshold) == (0, "", 0.125)


def test_without_a_rate_the_suggestion_is_drawn_and_without_a_method_what_the_service_takes(
    inspect: Callable[..., Result], services: FakeServices, clip: str
) -> None:
    suggested = {"rate": 0.0, "method": "pixel_change", "seed": None, "threshold": 0.1}
    for flags in ((), ("--pruning-method", "pixel_change")):
        assert json.loads(inspect(clip, *flags, "--json").stdout)["pruning"] == suggested
    by_rate = json.loads(inspect(clip, "--pruning-rate", "0.5", "--json").stdout)["pruning"]
    assert (by_rate["rate"], by_rate["method"]) == (0.5, services.methods[-1])
    needs = inspect(clip, "--pruning-method", "vcast")
    assert (needs.exit_code, "--pruning-method vcast needs --pruning-rate" in " ".join(needs.stderr.split())) == (
        2,
        True,
    )
    services.methods = ("evs", "none")
    assert "pixel_change" in (refused := inspect(clip).stderr)
    assert "--pruning-rate 0.75" in refused


@pytest.mark.parametrize(
    ("method", "kept", "by_slice"),
    [("vidcom2", [4, 6, 9], [1, 2]), ("none", None, [6, 6])],  # without the field, all tokens are kept
)
def test_json_counts_tokens_by_slice(
    inspect: Callable[..., Result],
    services: FakeServices,
    clip: str,
    method: str,
    kept: list[int] | None,
    by_slice: list[int],
) -> None:
    services.plan, services.kept = SLICES_APART, kept
    printed = json.loads(inspect(clip, "--pruning-method", method, "--pruning-rate", "0.75", "--json").stdout)
    assert printed["kept_tokens_by_slice"] == by_slice
    assert (printed["tokens"], printed["kept_tokens"], printed["repaired_frames"]) == (12, sum(by_slice), 2)
    assert printed["pruning"] == {"rate": 0.75, "method": method, "seed": None, "threshold": None}


def test_an_image_in_slices_is_drawn_as_its_source_and_slices(
    inspect: Callable[..., Result], services: FakeServices, tmp_path: Path
) -> None:
    services.plan, services.kept = SLICED, None
    photo = tmp_path / "photo.png"
    photo.write_bytes(b"photo")
    assert inspect(str(photo)).stdout.endswith("7 of 7 tokens kept, source and 3 × 2 slices, 1 tokens each\n")
    with Image.open(tmp_path / "kept.png") as picture:
        colours = {colour for _, colour in picture.getcolors(2**16) or []}
    assert colours >= {(level,) * 3 for level in range(40, 40 + 7 * 30, 30)}  # of the seven pictures
    assert (0, 0, 0) not in colours  # none is padded to the size of another


def test_several_methods_are_drawn_side_by_side_and_counted_each(
    inspect: Callable[..., Result], services: FakeServices, clip: str, tmp_path: Path
) -> None:
    assert inspect(clip, "--pruning-rate", "0.5").exit_code == 0
    with Image.open(tmp_path / "kept.png") as picture:
        alone = picture.size
    methods = ("--pruning-method", "evs", "--pruning-method", "random", "--pruning-method", "evs")
    result = inspect(clip, "--pruning-rate", "0.5", *methods, "--json")
    counts = json.loads(result.stdout)
    assert [each["pruning"]["method"] for each in counts] == ["evs", "random"]
    assert [each["kept_tokens"] for each in counts] == [4, 4]
    with Image.open(tmp_path / "kept.png") as picture:
        assert picture.width > 1.5 * alone[0]
        assert picture.height == alone[1]
    asked = [each.pruning.method for each in services.asked if isinstance(each, encoder_pb2.EncodePrompt)]
    assert sorted(asked) == ["", "evs", "random"]


def test_an_answer_dims_the_kept_patches_by_its_attention(
    inspect: Callable[..., Result], services: FakeServices, address: str, clip: str, tmp_path: Path
) -> None:
    name = tmp_path / "attention.png"
    asks = ("--answer", "What moves?", "--generation", address, "--pruning-rate", "0.5", "-o", str(name))
    result = inspect(clip, *asks)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[1:] == ["A red ball ⚽", "25.0% of the attention is on the video"]
    asked = next(each for each in services.asked if isinstance(each, generation_pb2.GenerateRequest))
    assert asked.sampling.attention
    assert asked.prompt.messages[0].parts[0].video.pruning.rate == 0.5
    printed = json.loads(inspect(clip, *asks, "--json").stdout)
    assert (printed["question"], printed["answer"]) == ("What moves?", "A red ball ⚽")
    told = printed["attention"]
    assert (told["text_share"], told["media_share"], told["kept"]) == (0.75, pytest.approx(0.25), [0, 1, 2, 3])
    assert told["weights"] == pytest.approx([0.16, 0.04, 0.04, 0.01])
    assert [each["text"] for each in told["tokens"]] == ["A red ", "ball ⚽"]
    assert [each["media_share"] for each in told["tokens"]] == pytest.approx([0.4, 0.1])


def test_a_patch_is_as_bright_as_the_root_of_its_share_of_the_greatest_weight() -> None:
    level, paper = 216, np.array((16, 18, 23))
    frames, grid, kept = np.full((2, 56, 56, 3), level, np.uint8), Grid(2, 2, 2), np.arange(4, dtype=np.int32)
    weights = np.array([[[0.16, 0.04], [0.04, 0.01]], [[0, 0], [0, 0]]], np.float32)
    sheet = contact_sheet(frames, grid, kept, (), "", "", 1, weights=weights)
    colours = {colour for _, colour in sheet.getcolors(2**16) or []}
    dimmed = 0.32 * level + 0.68 * paper
    for light in (1, 0.5, 0.25, 0):
        assert tuple((dimmed + light * (level - dimmed)).round().astype(int).tolist()) in colours


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--answer", "What?"), "--generation must be given with"),
        (("--generation", "127.0.0.1:1"), "--generation must be given with"),
        (("--max-new-tokens", "4"), "--max-new-tokens is of the answer, and needs --answer"),
    ],
)
def test_an_answer_needs_all_its_flags(
    inspect: Callable[..., Result], clip: str, flags: tuple[str, ...], words: str
) -> None:
    refused = inspect(clip, *flags)
    assert (refused.exit_code, words in " ".join(refused.stderr.replace("│", " ").split())) == (2, True)
