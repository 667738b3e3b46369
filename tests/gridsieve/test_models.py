"""`gridsieve models` prints every family, for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

from typer.testing import Result

from gridsieve.families import FAMILIES


def test_models_prints_each_family_and_what_it_can_do(gridsieve: Callable[..., Result]) -> None:
    printed, as_json = gridsieve("models"), gridsieve("models", "--json")
    assert (printed.exit_code, as_json.exit_code) == (0, 0)
    lines, families = printed.stdout.splitlines(), json.loads(as_json.stdout)["families"]
    assert [each["model_type"] for each in families] == [each.model_type for each in FAMILIES]
    assert [line.split()[0] for line in lines[::2]] == [each["model_type"] for each in families]
    by_type = {each["model_type"]: (each, line) for each, line in zip(families, lines[1::2], strict=True)}
    llava, line = by_type["llava"]
    assert (llava["media"], llava["pruning_methods"], llava["positions"]) == (["image"], [], "one-dimensional")
    assert line.strip() == "images; positions one-dimensional; no videos"
    assert by_type["internvl"][0]["media"] == ["image", "video"]
    assert "evs" in by_type["internvl"][0]["pruning_methods"]
    assert by_type["internvl"][1].strip().startswith("images and videos; pruned after the tower by evs")
    assert by_type["minicpmv"][1].strip().startswith("images and videos; not pruned; positions one-dimensional; ")
    assert (by_type["qwen3_vl"][0]["live"], by_type["glm4v"][0]["live"]) == (True, False)
    before = {
        name: (each["before_tower"], "before the tower by pixel_change" in line)
        for name, (each, line) in by_type.items()
    }
    assert before["qwen2_5_vl"] == (["pixel_change"], True)
    assert before["internvl"] == ([], False)
