"""What all services read alike of MiniCPM-V's config.json."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.families.minicpm.versions import queries_of, version_of
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.generation.loading import check_ranks, load_language_model
from gridsieve.services.preprocessing.layouts.family import load_family
from tests.families import minicpm

CPU = torch.device("cpu")
LOADERS: tuple[Callable[[Checkpoint], object], ...] = (
    load_family,
    lambda checkpoint: load_tower(checkpoint, "float32", CPU),
    lambda checkpoint: load_language_model(checkpoint, torch.float32, CPU),
    lambda checkpoint: check_ranks(checkpoint, 2),
)


def test_every_service_refuses_an_unknown_version_and_a_missing_one(tmp_path: Path) -> None:
    known = "is not supported, only 2.5, 2.6, 4.0, 4.5"
    of_2_0 = f"version '2.0' {known}: a tower of timm's and a language model that scales"
    for changes, named in (
        ({"version": 4.6}, f"version '4.6' {known}$"),
        ({"version": None}, f"without a version in config.json {known}$"),
        ({"version": "2.0"}, of_2_0),
        ({"version": None, "hidden_size": 2304, "query_num": 64}, of_2_0),
    ):
        minicpm.write(tmp_path, 1, changes=changes)
        for load in LOADERS:
            with pytest.raises(StartupError, match=f"^MiniCPM-V {named}"):
                load(Checkpoint(tmp_path))


def test_every_service_takes_2_5_without_a_version_by_its_96_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(minicpm.QUERIES, "2.5", 96)
    minicpm.write(tmp_path, 1, "2.5", {"version": None})
    for load in LOADERS:
        load(Checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("stated", "version"), [(2.5, "2.5"), ("2.6", "2.6"), (4, "4.0"), (4.0, "4.0"), ("4", "4.0"), (4.5, "4.5")]
)
def test_a_version_is_a_number_or_its_text(stated: Any, version: str) -> None:
    assert version_of({"version": stated}) == version


def test_a_picture_has_as_many_queries_as_published_where_the_config_names_none() -> None:
    assert [queries_of({"version": version}) for version in (2.5, 2.6, 4.0, 4.5)] == [96, 64, 64, 64]
    assert queries_of({"version": 2.5, "query_num": 6}) == 6
